"""Experts in tensors of all of them, as gpt-oss's safetensors have them, and files of experts that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from polarlm.model_loaders import LoadError, load_weights
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.joined_experts import split_experts
from polarlm.model_loaders.files.safetensors_source import read_header
from tests.model_loaders.checkpoints import MODELS, as_gguf, read_all
from tests.quantized import write

COUNT, SIZE, COLUMNS = 3, 5, 64
NAMES = ("{}.gate", "{}.up")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def stored(path: Path, **tensors: np.ndarray) -> dict:
    """The tensors of a file with these arrays."""
    write(path, tensors, {})
    return read_header(FileBytes(path))


def joined(path: Path, **tensors: np.ndarray) -> dict:
    return split_experts(stored(path, **tensors), "x", NAMES, COUNT, SIZE, COLUMNS)


def test_rows_of_gate_and_up_projection_are_columns(tmp_path: Path) -> None:
    whole = np.arange(COUNT * COLUMNS * 2 * SIZE, dtype=np.float32).reshape(COUNT, COLUMNS, 2 * SIZE)
    bias = np.arange(COUNT * 2 * SIZE, dtype=np.float32).reshape(COUNT, 2 * SIZE)
    parts = joined(tmp_path / "x.safetensors", x=whole, x_bias=bias)
    assert len(parts) == 4 * COUNT
    for expert in range(COUNT):
        for first, name in enumerate(("gate", "up")):
            matrix, vector = parts[f"{expert}.{name}.weight"], parts[f"{expert}.{name}.bias"]
            assert (matrix.shape, vector.shape) == ((SIZE, COLUMNS), (SIZE,))
            np.testing.assert_array_equal(matrix.raw(slice(1, 4)).view("<f4"), whole[expert, :, first::2].T[1:4])
            np.testing.assert_array_equal(vector.raw(slice(1, 4)).view("<f4")[:, 0], bias[expert, first::2][1:4])


def test_blocks_are_those_of_gguf(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    codes = random.integers(0, 256, (COUNT, 2 * SIZE, COLUMNS // 32, 16), dtype=np.uint8)
    scales = random.integers(120, 135, (COUNT, 2 * SIZE, COLUMNS // 32), dtype=np.uint8)
    values = FP4[np.stack([codes & 15, codes >> 4], -1)].reshape(*scales.shape, 32)
    values = np.ldexp(values, scales[..., None].astype(np.int32) - 127).reshape(COUNT, 2 * SIZE, COLUMNS)
    parts = joined(tmp_path / "x.safetensors", x_blocks=codes, x_scales=scales)
    for expert in range(COUNT):
        for first, name in enumerate(("gate", "up")):
            tensor = parts[f"{expert}.{name}.weight"]
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
    tensors = stored(tmp_path / "x.safetensors", x_blocks=CODES, x_scales=SCALES)
    with pytest.raises(LoadError, match="rows of 40 values, not of blocks of 32"):
        split_experts(tensors, "x", NAMES, COUNT, SIZE, 40)


@pytest.mark.parametrize(
    ("rule", "dropped", "rows", "sentence"),
    [
        ({"top_k": 9}, None, None, "expert_used_count is 9, but each layer has only 8 experts"),
        ({}, ".experts.7.", None, r"lacks .*ffn_gate_exps\.weight\[7\]"),
        ({}, None, 39, r"ffn_gate_exps.* has the shape \(39, 32\), .* \(40, 32\)"),
    ],
)
def test_gguf_files(rule: dict[str, int], dropped: str | None, rows: int | None, sentence: str, tmp_path: Path) -> None:
    """The same matrix of all experts is one tensor with three dimensions."""
    config, weights, _ = load_weights(MODELS / "olmoe_all_heads")
    tensors = {name: tensor for name, tensor in read_all(weights).items() if dropped is None or dropped not in name}
    for name in tensors:
        tensors[name] = tensors[name][:rows] if name.endswith(".gate_proj.weight") else tensors[name]
    layers = tuple(replace(layer, ffn=replace(layer.ffn, **rule)) for layer in config.layers)
    with pytest.raises(LoadError, match=sentence):
        load_weights(as_gguf(tmp_path / "model.gguf", "olmoe", replace(config, layers=layers), tensors))
