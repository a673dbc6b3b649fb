"""Experts in tensors of all of them, as gpt-oss's safetensors have them: each matrix, and files that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from polarlm.model_loaders import LoadError, load_weights
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.joined_experts import taken_apart
from polarlm.model_loaders.files.safetensors_source import read_header
from tests.model_loaders.checkpoints import MODELS, read, safetensors_file

COUNT, SIZE, COLUMNS = 3, 5, 64
NAMES = ("{}.gate", "{}.up")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def stored(path: Path, **tensors: np.ndarray) -> dict:
    """The tensors of a file with these arrays."""
    types, header, data = {"float32": "F32", "uint8": "U8"}, {}, b""
    for name, array in tensors.items():
        place = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": types[array.dtype.name], "shape": array.shape, "data_offsets": place}
        data += array.tobytes()
    return read_header(FileBytes(safetensors_file(path, header, data)))


def joined(path: Path, **tensors: np.ndarray) -> dict:
    return taken_apart(stored(path, **tensors), "x", NAMES, COUNT, SIZE, COLUMNS)


def test_rows_of_gate_and_up_projection_are_columns(tmp_path: Path) -> None:
    whole = np.arange(COUNT * COLUMNS * 2 * SIZE, dtype=np.float32).reshape(COUNT, COLUMNS, 2 * SIZE)
    bias = np.arange(COUNT * 2 * SIZE, dtype=np.float32).reshape(COUNT, 2 * SIZE)
    found = joined(tmp_path / "x.safetensors", x=whole, x_bias=bias)
    assert len(found) == 4 * COUNT
    for expert in range(COUNT):
        for first, name in enumerate(("gate", "up")):
            matrix, vector = found[f"{expert}.{name}.weight"], found[f"{expert}.{name}.bias"]
            assert (matrix.shape, vector.shape) == ((SIZE, COLUMNS), (SIZE,))
            np.testing.assert_array_equal(matrix.raw(slice(1, 4)).view("<f4"), whole[expert, :, first::2].T[1:4])
            np.testing.assert_array_equal(vector.raw(slice(1, 4)).view("<f4")[:, 0], bias[expert, first::2][1:4])


def test_blocks_are_those_of_gguf(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    codes = random.integers(0, 256, (COUNT, 2 * SIZE, COLUMNS // 32, 16), dtype=np.uint8)
    scales = random.integers(120, 135, (COUNT, 2 * SIZE, COLUMNS // 32), dtype=np.uint8)
    values = FP4[np.stack([codes & 15, codes >> 4], -1)].reshape(*scales.shape, 32)
    values = np.ldexp(values, scales[..., None].astype(np.int32) - 127).reshape(COUNT, 2 * SIZE, COLUMNS)
    found = joined(tmp_path / "x.safetensors", x_blocks=codes, x_scales=scales)
    for expert in range(COUNT):
        for first, name in enumerate(("gate", "up")):
            tensor = found[f"{expert}.{name}.weight"]
            assert (tensor.dtype, tensor.shape) == ("MXFP4", (SIZE, COLUMNS))
            rows = gguf.dequantize(tensor.raw(slice(1, 4)), gguf.GGMLQuantizationType.MXFP4)
            np.testing.assert_array_equal(rows, values[expert, first::2][1:4])


CODES = np.zeros((COUNT, 2 * SIZE, 2, 16), np.uint8)
SCALES = np.zeros((COUNT, 2 * SIZE, 2), np.uint8)


UNFIT: list[tuple[dict[str, np.ndarray], str]] = [
    ({"x_blocks": CODES}, "lacks x_scales"),
    ({"x_scales": SCALES}, "lacks x_blocks"),
    ({"x_blocks": CODES[:2], "x_scales": SCALES}, "x_blocks is U8 \\(2, 10, 2, 16\\), but the configuration asks"),
    ({"x_blocks": CODES, "x_scales": SCALES.astype(np.float32)}, "x_scales is F32"),
    ({"x": np.zeros((COUNT, 2 * SIZE, COLUMNS), np.float32)}, "x is F32 \\(3, 10, 64\\)"),
    ({"x_bias": np.zeros((COUNT, SIZE), np.float32)}, "x_bias is F32 \\(3, 5\\)"),
]


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for tensors, problem in UNFIT:
        with pytest.raises(LoadError, match=problem):
            joined(tmp_path / "x.safetensors", **tensors)


def test_rows_of_whole_blocks_are_needed(tmp_path: Path) -> None:
    tensors = stored(tmp_path / "x.safetensors", x_blocks=CODES, x_scales=SCALES)
    with pytest.raises(LoadError, match="rows of 40 values, not of blocks of 32"):
        taken_apart(tensors, "x", NAMES, COUNT, SIZE, 40)


def changed(tmp_path: Path, name: str, change: Callable[[dict], None]) -> Path:
    """A copy of a stored model with another configuration."""
    folder = shutil.copytree(MODELS / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_other_quantizations_are_refused(tmp_path: Path) -> None:
    other = changed(tmp_path, "gpt_oss_mxfp4", lambda config: config["quantization_config"].update(quant_method="gptq"))
    with pytest.raises(LoadError, match="has a quantization_config"):
        load_weights(other)
    dense = changed(tmp_path, "llama_mha", lambda config: config.update(quantization_config={"quant_method": "mxfp4"}))
    with pytest.raises(LoadError, match="has a quantization_config"):
        load_weights(dense)


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_other_constants_of_the_activation_are_refused(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=key):
        load_weights(changed(tmp_path, "gpt_oss_transposed", lambda config: config.update({key: value})))


def test_matrices_are_the_same_however_many_rows_are_read() -> None:
    for name in ("gpt_oss_transposed", "gpt_oss_mxfp4"):
        weights = load_weights(MODELS / name)[1]
        tensor = "model.layers.1.mlp.experts.2.up_proj.weight"
        whole = read(weights, tensor)
        part = np.empty((3, whole.shape[1]), np.float32)
        weights.read_into(tensor, part, slice(2, 5))
        np.testing.assert_array_equal(part, whole[2:5])
