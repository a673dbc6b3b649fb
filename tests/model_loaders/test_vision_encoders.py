"""Vision encoders in folders and in files of llama.cpp's, and the sizes that images get."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.weights import load_vision_encoder
from polarlm.model_loaders import LoadError, load, load_weights, vision_encoders
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.vision_encoders import gemma3, gemma4, glm4v, lfm2_vl, loss, pixtral, qwen2_5_vl, qwen3_vl
from polarlm.model_loaders.vision_encoders._qwen import PATCHES, QwenVisionEncoder
from polarlm.model_loaders.vision_encoders.qwen2_5_vl import WindowVisionEncoder
from tests.model.test_vision_encoders import finished, read_vision_encoder
from tests.model_loaders.checkpoints import MODELS, as_gguf, finish, interleaved, read_all

WINDOWS, DEEP = "qwen2_5_vl_windows", "qwen3_vl_deepstack_tied"
ARCHITECTURES = {WINDOWS: "qwen2vl", DEEP: "qwen3vl"}
GLM, OCR = "glm4v_positions", "glm_ocr_norms"
PROJECTORS = {WINDOWS: "qwen2.5vl_merger", DEEP: "qwen3vl_merger", GLM: "glm4v", OCR: "glm4v"}
# Width and height of an image, and what transformers makes of it in Qwen2.5-VL, Qwen3-VL, Pixtral, LFM2-VL, GLM 4.1V;
SIZES = [
    ((1, 1), (56, 56), (256, 256), (28, 28), (256, 256), (84, 84)),
    ((1, 200), (28, 812), (32, 3648), (28, 224), (32, 3648), (28, 5600)),
    ((13, 7), (84, 56), (352, 192), (28, 28), (352, 192), (112, 84)),
    ((42, 14), (112, 56), (448, 160), (56, 28), (448, 160), (140, 56)),
    ((70, 98), (56, 112), (224, 320), (84, 112), (224, 320), (56, 112)),  # halves are rounded to even numbers
    ((256, 255), (252, 252), (256, 256), (280, 280), (256, 256), (252, 252)),
    ((640, 480), (644, 476), (640, 480), (644, 504), (576, 416), (644, 476)),
    ((1000, 17), (1008, 28), (1984, 64), (1008, 28), (1984, 64), (1652, 28)),
    ((3000, 2000), (2996, 1988), (3008, 1984), (1540, 1036), (608, 416), (2968, 1960)),
    ((4096, 4096), (3584, 3584), (4096, 4096), (1540, 1540), (512, 512), (2408, 2408)),
    ((5000, 4001), (4004, 3192), (4576, 3648), (1540, 1232), (544, 448), (2688, 2156)),
    ((10000, 60), (9996, 56), (9984, 64), (1540, 28), (6592, 32), (9996, 56)),
]
# and in Gemma 4 with at most 280 and at most 70 rows.
GEMMAS_SIZES = [
    ((1, 1), (768, 768), (384, 384)),
    ((1, 200), (48, 11328), (48, 3360)),
    ((13, 7), (1056, 576), (528, 288)),
    ((480, 640), (672, 912), (336, 432)),
    ((1000, 17), (6144, 96), (3072, 48)),
    ((3000, 2000), (960, 624), (480, 288)),
    ((20, 10001), (48, 13440), (48, 3360)),
    ((768, 769), (768, 768), (384, 384)),
]


def qwen_encoder(module: object, **vision: object) -> QwenVisionEncoder:
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 8, "out_hidden_size": 32, "num_heads": 4, **vision}
    return module.configure(Fields({"model_type": "qwen3_vl", "vision_config": sizes}, "config.json"), Fields({}, ""))


def gemma_encoder(module: Any, prepared: dict[str, object] | None = None, **vision: object) -> Any:
    """prepared: what preprocessor_config.json says. `whole` of vision: what config.json says of the whole model."""
    whole = vision.pop("whole", {})
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2}
    sizes |= {"patch_size": 14, "head_dim": 16, "image_size": 896, **vision}
    fields = {"text_config": {"hidden_size": 16}, "vision_config": sizes, **whole}
    return module.configure(Fields(fields, "config.json"), Fields(prepared or {}, "preprocessor_config.json"))


def test_images_get_the_sizes_that_transformers_gives_them() -> None:
    deep = qwen_encoder(qwen3_vl, deepstack_visual_indexes=[])
    small, large = (gemma_encoder(gemma4, {"max_soft_tokens": rows}, patch_size=16) for rows in (70, 280))
    square = gemma_encoder(gemma3)
    lines = gemma_encoder(pixtral, image_size=1540)
    whole = gemma_encoder(lfm2_vl, patch_size=16)
    frames = qwen_encoder(glm4v)
    assert not loss(whole, 720, 720)  # tiles are for more than twice the most pixels
    assert "512 × 512 pixels, and not in tiles" in loss(whole, 730, 730)
    assert not loss(gemma_encoder(lfm2_vl, {"do_image_splitting": False}, patch_size=16), 730, 730)
    for sizes, of in ((SIZES, (qwen_encoder(qwen2_5_vl), deep, lines, whole, frames)), (GEMMAS_SIZES, (large, small))):
        for image, *wanted in sizes:
            for vision_encoder, size in zip(of, wanted, strict=True):
                shape, side = vision_encoders.fit(vision_encoder, *image), vision_encoder.merge * vision_encoder.patch
                assert (shape.width, shape.height) == size
                assert shape.rows == shape.grid[0] * shape.grid[1] == size[0] * size[1] // side**2
            assert vision_encoders.fit(square, *image) == (896, 896, 256, (16, 16), ())
    shape = vision_encoders.fit(deep, 10**6, 1)  # transformers refuses what is 200 times as long as wide
    assert deep.pixels[0] <= shape.width * shape.height <= deep.pixels[1]


def test_a_folder_without_the_tensors_or_of_another_kind_has_no_vision_encoder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODELS / DEEP, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in weights.items() if "visual" not in name}, folder / "model.safetensors")
    assert vision_encoders.vision_encoder_of(folder) is None
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": "llava"}))
    assert vision_encoders.vision_encoder_of(folder) is None
    (folder / "config.json").write_text(json.dumps(fields))
    del weights["model.visual.blocks.1.norm2.bias"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"lacks the tensor visual.blocks.1.norm2.bias, which the part that reads"):
        vision_encoders.vision_encoder_of(folder)


PLAIN: dict[str, Any] = {"deepstack_visual_indexes": []}
UNREADABLE: list[tuple[Callable[..., object], Any, dict[str, Any], str]] = [
    (qwen_encoder, qwen3_vl, {**PLAIN, "hidden_size": 60}, "60, which is not a multiple of 4 for each of 4 heads"),
    (qwen_encoder, qwen3_vl, {**PLAIN, "num_position_embeddings": 24}, "embeddings is 24, which is not a square"),
    (qwen_encoder, qwen3_vl, {"deepstack_visual_indexes": [2]}, "but there are 2 layers"),
    (qwen_encoder, qwen3_vl, {**PLAIN, "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (qwen_encoder, qwen3_vl, {**PLAIN, "temporal_patch_size": 1}, "temporal_patch_size is 1"),
    (qwen_encoder, glm4v, {"attention_bias": True}, "attention_bias is True, but only False"),
    (qwen_encoder, glm4v, {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu'"),
    (gemma_encoder, gemma3, {"whole": {"mm_tokens_per_image": 200}}, "is 200, but an image has 64 × 64 patches"),
    (gemma_encoder, gemma3, {"prepared": {"image_mean": [0.4] * 3}}, "image_mean is"),
    (gemma_encoder, gemma3, {"hidden_size": 33}, "hidden_size is 33, which is not a multiple"),
    (gemma_encoder, pixtral, {"hidden_size": 36}, "hidden_size is 36, which is not a multiple of 4 for each of 2 head"),
    (gemma_encoder, pixtral, {"whole": {"multimodal_projector_bias": True}}, "projector_bias is True, but only False"),
    (gemma_encoder, lfm2_vl, {"patch_size": 16, "num_patches": 200}, "num_patches is 200, which is not a square"),
    (gemma_encoder, gemma4, {"patch_size": 16, "head_dim": 18}, "head_dim is 18, but must be a multiple of 4"),
]


def test_a_vision_encoder_that_cannot_be_read_is_named() -> None:
    for encoder, module, settings, problem in UNREADABLE:
        with pytest.raises(LoadError, match=problem):
            encoder(module, **settings)


def header(path: Path, vision_encoder: Any, **numbers: int) -> gguf.GGUFWriter:
    """A writer of llama.cpp's file of a vision encoder, with what all of them say, and further numbers."""
    writer = gguf.GGUFWriter(path, "clip")
    numbers |= {"embedding_length": vision_encoder.hidden_size, "block_count": vision_encoder.layers}
    numbers |= {"patch_size": vision_encoder.patch, "attention.head_count": vision_encoder.heads}
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    for key in ("mean", "std"):
        writer.add_array(f"clip.vision.image_{key}", list(getattr(vision_encoder, key, (0.5,) * 3)))
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision_encoder.eps)
    return writer


def write_mmproj(path: Path, name: str) -> Path:
    """The vision encoder of a fixture as llama.cpp's converter writes it, in F32."""
    found = vision_encoders.vision_encoder_of(MODELS / name)
    assert found is not None
    vision_encoder, weights = found
    numbers = dict(zip(("image_min_pixels", "image_max_pixels"), vision_encoder.pixels, strict=True))
    if isinstance(vision_encoder, WindowVisionEncoder):
        numbers |= {"n_wa_pattern": 2, "window_size": 8}
    writer = header(path, vision_encoder, spatial_merge_size=vision_encoder.merge, **numbers)
    writer.add_string("clip.projector_type", PROJECTORS[name])
    for spec in vision_encoders.tensors(vision_encoder).specs():
        x = read_all(weights)[spec.name]
        if ".ffn_" in spec.gguf:  # without the zeros that were added
            x = x[
                tuple(slice(vision_encoder.ffn_size if size > vision_encoder.hidden_size else None) for size in x.shape)
            ]
        if spec.name != PATCHES:
            side = vision_encoder.merge
            writer.add_tensor(spec.gguf, x.reshape(len(x), -1, side, side) if spec.flat else x)
            continue
        frames = x.reshape(len(x), 3, 2, vision_encoder.patch, vision_encoder.patch)
        for frame, suffix in enumerate(("", ".1")):
            writer.add_tensor(spec.gguf + suffix, np.ascontiguousarray(frames[:, :, frame]))
    finish(writer)
    return path


@pytest.mark.parametrize("name", PROJECTORS)
def test_a_file_of_llama_cpp_has_the_same_vision_encoder(name: str, tmp_path: Path) -> None:
    of_folder = vision_encoders.vision_encoder_of(MODELS / name)
    assert of_folder is not None
    vision_encoder, weights = vision_encoders.open_mmproj(write_mmproj(tmp_path / "mmproj.gguf", name))
    assert vision_encoder.mean == pytest.approx(of_folder[0].mean)
    assert vision_encoder.eps == pytest.approx(of_folder[0].eps)
    of_file = replace(vision_encoder, **{key: getattr(of_folder[0], key) for key in ("mean", "std", "eps")})
    assert of_file == of_folder[0]
    expected = read_all(of_folder[1])
    assert weights.names() == expected.keys()
    for key, tensor in read_all(weights).items():
        np.testing.assert_array_equal(tensor, expected[key], err_msg=key)


@pytest.mark.parametrize("name", [GLM, OCR])
def test_tensors_have_the_names_that_llama_cpp_gives_them(name: str) -> None:
    official, found = (
        gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8),
        vision_encoders.vision_encoder_of(MODELS / name),
    )
    assert found is not None
    for spec in vision_encoders.tensors(found[0]).specs():
        assert spec.gguf == official.get_name(spec.name, try_suffixes=(".weight", ".bias"))


def write_gguf(path: Path, name: str) -> Path:
    config, weights, _ = load_weights(MODELS / name)
    sections = [*config.attention.rope.sections, 0]
    return as_gguf(path, ARCHITECTURES[name], config, read_all(weights), rope__dimension_sections=sections)


def test_the_vision_encoder_beside_a_gguf_file_is_taken_if_it_belongs_to_the_model(tmp_path: Path) -> None:
    """The type that is read best comes first; a vision encoder that is named must belong to the model."""
    model = write_gguf(tmp_path / "model.gguf", DEEP)
    assert load(model).vision_encoder is None
    other = write_mmproj(tmp_path / "mmproj-F16.gguf", WINDOWS)
    (tmp_path / "mmproj-damaged-F16.gguf").write_bytes(b"GGUF")
    for label in ("Q8_0", "BF16"):
        write_mmproj(tmp_path / f"tiny-mmproj-{label.lower()}.gguf", DEEP)
    found = load(model)
    assert found.vision_encoder is not None
    assert found.vision_encoder.kind == "qwen3_vl"
    assert {path.name for path in found.vision_weights.files()} == {"tiny-mmproj-bf16.gguf"}
    with pytest.raises(LoadError, match=r"mmproj-F16.gguf is the part of another model.*give the mmproj file of this"):
        load(model, mmproj=str(other))
    with pytest.raises(LoadError, match=r"holds no part that reads images; supported are .*qwen2.5vl_merger, qwen3vl"):
        load(model, mmproj=str(model))


def test_a_folder_of_a_model_for_images_has_its_vision_encoder() -> None:
    assert json.loads((MODELS / WINDOWS / "preprocessor_config.json").read_text())["max_pixels"] == 1024
    model = load(MODELS / WINDOWS)
    assert model.vision_encoder is not None
    assert model.vision_encoder.pixels == (64, 1024)
    assert model.vision_encoder.whole == (1,)


KINDS = {"gemma3": "gemma3", "gemma4": "gemma4v", "lfm2_vl": "lfm2", "pixtral": "pixtral"}  # llama.cpp's names


def write_plain(path: Path, name: str, *, is_swapped: bool) -> Path:
    """The vision encoder of a fixture as llama.cpp's converter writes it. is_swapped: as an older one did."""
    found = vision_encoders.vision_encoder_of(MODELS / name)
    assert found is not None
    vision_encoder = found[0]
    found[1].close()
    merge = "spatial_merge_size" if vision_encoder.kind == "pixtral" else "projector.scale_factor"
    numbers = {"feed_forward_length": vision_encoder.ffn_size, "image_size": 24, merge: vision_encoder.merge}
    writer = header(path, vision_encoder, **numbers)
    writer.add_string("clip.vision.projector_type", KINDS[vision_encoder.kind])
    labels = {spec.name: spec.gguf for spec in vision_encoders.tensors(vision_encoder).specs()}
    for key, x in load_file(MODELS / name / "model.safetensors").items():
        label = labels.get(key.removeprefix("model."))
        if label is None:
            continue
        if label == "v.patch_embd.weight" and vision_encoder.kind in ("gemma4", "lfm2_vl"):
            x = np.ascontiguousarray(x.reshape(-1, vision_encoder.patch, vision_encoder.patch, 3).transpose(0, 3, 1, 2))
        if vision_encoder.kind == "pixtral" and label.endswith(("attn_q.weight", "attn_k.weight")):
            x = interleaved(x, vision_encoder.heads)
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
        ("mistral3_lines", False),
        ("lfm2_vl_tied", False),
        ("lfm2_vl_plain_rows", False),
    ],
)
def test_a_file_of_llama_cpp_gives_the_same_rows(name: str, tmp_path: Path, is_swapped: bool) -> None:
    vision_encoder, weights = vision_encoders.open_mmproj(
        write_plain(tmp_path / "mmproj.gguf", name, is_swapped=is_swapped)
    )
    of_folder = read_vision_encoder(MODELS / name, NumpyOps())
    assert vision_encoder.outputs == of_folder.encoder.outputs
    pixels = np.load(MODELS / name / "images.npz")["pixels_1"]
    shape = vision_encoders.fit(of_folder.encoder, *pixels.shape[1::-1])
    ours, wanted = (
        finished(reader.read(pixels, shape))[0].rows
        for reader in (load_vision_encoder(NumpyOps(), vision_encoder, weights), of_folder)
    )
    weights.close()
    np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_mistral_small_is_llama_with_its_vocabulary_in_files_of_llama_cpp(tmp_path: Path) -> None:
    """No other Llama gets an mmproj file of Mistral's that happens to lie beside it."""
    mmproj = write_plain(tmp_path / "mmproj.gguf", "mistral3_lines", is_swapped=False)
    vision_encoder, weights = vision_encoders.open_mmproj(mmproj)
    weights.close()
    metadata = {"clip.vision.projector_type": "pixtral"}
    config = replace(load_weights(MODELS / "llama_mha")[0], hidden_size=vision_encoder.outputs)
    for vocabulary, is_mistral in ((131_072, True), (32_000, False)):
        model = replace(config, vocab_size=vocabulary)
        assert vision_encoders.reads_images(model) is is_mistral
        assert vision_encoders.may_belong(metadata, model) is is_mistral
        assert vision_encoders.belongs(vision_encoder, model) is is_mistral


def test_a_decoder_of_glm_without_sections_of_rope_gets_no_vision_encoder() -> None:
    """GLM-4.5-Air has the family and the sizes of GLM 4.5V."""
    metadata = {"clip.vision.projector_type": "glm4v"}
    for name, takes in (("glm4v_moe_sections", True), ("glm4_moe_qk_norm", False)):
        config = load_weights(MODELS / name)[0]
        assert vision_encoders.reads_images(config) is takes
        assert vision_encoders.may_belong(metadata, config) is takes
