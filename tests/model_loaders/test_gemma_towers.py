"""Gemma's towers: the sizes that images get, and llama.cpp's files, which give the same rows as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.weights import load_tower
from polarlm.model_loaders import LoadError, towers
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.towers import gemma3, gemma4
from tests.model.test_towers import finished, read_tower
from tests.model_loaders.checkpoints import MODELS, finish

# Width and height of an image, and what transformers makes of it with at most 280 and at most 70 rows.
SIZES = [
    ((1, 1), (768, 768), (384, 384)),
    ((1, 200), (48, 11328), (48, 3360)),
    ((13, 7), (1056, 576), (528, 288)),
    ((480, 640), (672, 912), (336, 432)),
    ((1000, 17), (6144, 96), (3072, 48)),
    ((3000, 2000), (960, 624), (480, 288)),
    ((20, 10001), (48, 13440), (48, 3360)),
    ((768, 769), (768, 768), (384, 384)),
]


def configured(module: Any, prepared: dict[str, object], more: dict[str, object], **vision: object) -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2, **vision}
    fields = {"text_config": {"hidden_size": 16}, "vision_config": {"head_dim": 16, "image_size": 896, **sizes}, **more}
    return module.configure(Fields(fields, "config.json"), Fields(prepared, "preprocessor_config.json"))


def test_images_get_the_sizes_that_transformers_gives_them() -> None:
    small, large = (configured(gemma4, {"max_soft_tokens": rows}, {}) for rows in (70, 280))
    square = configured(gemma3, {}, {}, patch_size=14)
    for image, *wanted in SIZES:
        for tower, size in zip((large, small), wanted, strict=True):
            shape = towers.fit(tower, *image)
            assert (shape.width, shape.height) == size
            assert shape.rows == shape.grid[0] * shape.grid[1] == size[0] * size[1] // 48**2
        assert towers.fit(square, *image) == (896, 896, 256, (16, 16))


@pytest.mark.parametrize(
    ("module", "prepared", "more", "vision", "problem"),
    [
        (gemma3, {}, {"mm_tokens_per_image": 200}, {}, "mm_tokens_per_image is 200, but an image has 64 × 64 patches"),
        (gemma3, {"image_mean": [0.4] * 3}, {}, {}, "image_mean is"),
        (gemma3, {}, {}, {"hidden_size": 33}, "hidden_size is 33, which is not a multiple of 2 heads"),
        (gemma4, {}, {}, {"head_dim": 18}, "head_dim is 18, but must be a multiple of 4"),
    ],
)
def test_a_tower_that_cannot_be_read_is_named(
    module: Any, prepared: dict[str, object], more: dict[str, object], vision: dict[str, object], problem: str
) -> None:
    with pytest.raises(LoadError, match=problem):
        configured(module, prepared, more, **{"patch_size": 14 if module is gemma3 else 16, **vision})


def write_mmproj(path: Path, name: str, *, is_swapped: bool) -> Path:
    """The tower of a fixture as llama.cpp's converter writes it. is_swapped: as an older one did."""
    found = towers.tower_of(MODELS / name)
    assert found is not None
    tower, writer = found[0], gguf.GGUFWriter(path, "clip")
    found[1].close()
    numbers = {"embedding_length": tower.hidden_size, "block_count": tower.layers, "patch_size": tower.patch}
    numbers |= {"attention.head_count": tower.heads, "feed_forward_length": tower.ffn_size}
    numbers |= {"image_size": 24, "projector.scale_factor": tower.merge}
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_string("clip.vision.projector_type", "gemma3" if tower.kind == "gemma3" else "gemma4v")
    labels = {spec.name: spec.gguf for spec in towers.tensors(tower).specs()}
    for key, x in load_file(MODELS / name / "model.safetensors").items():
        label = labels.get(key.removeprefix("model."))
        if label is None:
            continue
        if label == "v.patch_embd.weight" and tower.kind == "gemma4":
            x = np.ascontiguousarray(x.reshape(-1, tower.patch, tower.patch, 3).transpose(0, 3, 1, 2))
        if is_swapped and ".ffn_" in label:
            label = label.replace("_up", "_").replace("_down", "_up").replace("ffn_.", "ffn_down.")
        writer.add_tensor(label, np.atleast_1d(x.astype(np.float32)) + ("soft_emb_norm" in label))
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("name", "is_swapped"),
    [
        ("gemma3_with_images", False),
        ("gemma3_with_images", True),
        ("gemma4_images_whole", False),
        ("gemma4_images_clipped", False),
    ],
)
def test_a_file_of_llama_cpp_gives_the_same_rows(name: str, tmp_path: Path, is_swapped: bool) -> None:
    tower, weights = towers.open_mmproj(write_mmproj(tmp_path / "mmproj.gguf", name, is_swapped=is_swapped))
    of_folder = read_tower(MODELS / name, NumpyOps())
    assert tower.outputs == of_folder.tower.outputs
    pixels = np.load(MODELS / name / "images.npz")["pixels_1"]
    shape = towers.fit(of_folder.tower, *pixels.shape[1::-1])
    ours, wanted = (
        finished(reader.read(pixels, shape))[0].rows for reader in (load_tower(NumpyOps(), tower, weights), of_folder)
    )
    weights.close()
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
