"""GLM 4.1V, GLM 4.5V and GLM-OCR: RoPE in two dimensions, gated networks, and a gated one that makes the rows.

Patches of GLM 4.1V and 4.5V have learned positions, which are interpolated for an image of another size. GLM-OCR has
none, but norms of queries and keys, and biases in its layers. Images are read, videos are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorSpec, TensorTable, slots_of
from polarlm.model_loaders.vision_encoders import ImageShape, _qwen
from polarlm.model_loaders.vision_encoders._vit import CHANNELS, CLIP, MAX_SIZE, fit_area, side_of

_OCR = "glm_ocr"
_PIXELS = 112 * 112, 28 * 28 * 15000  # least and most, of both frames
MODEL_TYPES = ("glm4v", "glm4v_moe", _OCR, "glm4", "glm4_moe")
HAS_SECTIONS = True
PREFIXES, take_apart = _qwen.PREFIXES, _qwen.take_apart
_ROWS = {  # sizes that are the numbers of rows of their tensors
    "out_hidden_size": "mm.model.fc.weight",
    "intermediate_size": "v.blk.0.ffn_up.weight",
    "merger_size": "mm.up.weight",
    "positions": "v.position_embd.weight",
}


@dataclass(frozen=True)
class GlmVisionEncoder(_qwen.QwenVisionEncoder):
    side: int  # positions along a side; 0 in GLM-OCR
    merger_size: int  # F of the network that makes the rows

    @property
    def is_ocr(self) -> bool:
        """Whether it is GLM-OCR's: layers have biases and norms of heads, and patches no positions and no norm."""
        return self.side == 0


def configure(fields: Fields, preprocessor: Fields) -> GlmVisionEncoder:
    vision, is_ocr = fields.section("vision_config"), fields.text("model_type") == _OCR
    assert vision is not None
    vision.require("attention_bias", is_ocr)
    outputs = vision.integer("out_hidden_size", maximum=MAX_SIZE)
    values = {"merger_size": CHANNELS * outputs, "positions": 0}
    if not is_ocr:
        side = vision.integer("image_size", 336, maximum=MAX_SIZE) // vision.integer("patch_size", 14)
        values = {"merger_size": vision.integer("intermediate_size"), "intermediate_size": outputs}
        values["positions"] = side**2
    encoder = _vision_encoder(vision.with_values(values), preprocessor, _PIXELS)
    return replace(encoder, pixels=_pixels_of_frame(encoder.pixels))


def _from_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> GlmVisionEncoder:
    sizes = {ours: shapes.get(label, (None,))[0] for ours, label in _ROWS.items()}
    vision = _qwen.fields_of_mmproj(fields, shapes).with_values(sizes)
    vision = vision.with_file_keys({"rms_norm_eps": "attention.layer_norm_epsilon"})
    return _vision_encoder(vision, vision, _pixels_of_frame(_PIXELS))


PROJECTORS = {"glm4v": _from_mmproj}


def _pixels_of_frame(pixels: tuple[int, int]) -> tuple[int, int]:
    return -(-pixels[0] // _qwen.FRAMES), pixels[1] // _qwen.FRAMES


def _vision_encoder(vision: Fields, preprocessor: Fields, pixels: tuple[int, int]) -> GlmVisionEncoder:
    vision.require("hidden_act", "silu")
    settings = _qwen.settings(vision, preprocessor, patch=14, pixels=pixels, **CLIP)
    settings |= {"before": "<|begin_of_image|>", "after": "<|end_of_image|>"}
    settings["eps"] = vision.positive("rms_norm_eps", 1e-5)
    side = side_of(vision, "positions", 0, minimum=0)
    return GlmVisionEncoder(
        kind="glm4v", **settings, side=side, merger_size=vision.integer("merger_size", maximum=MAX_SIZE)
    )


def fit(encoder: GlmVisionEncoder, width: int, height: int) -> ImageShape:
    """As in Qwen's encoders, of an image that is enlarged to the pixels of a row if it is smaller."""
    side = encoder.patch * encoder.merge
    grown = max(1.0, side / width, side / height)
    return fit_area(encoder, encoder.pixels, int(width * grown), int(height * grown))


def tensors(encoder: GlmVisionEncoder) -> TensorTable:
    c, e, f, merger = encoder.hidden_size, encoder.outputs, encoder.merger_size, "visual.merger"
    top: Slots = {
        **_qwen.patches_slot(encoder, has_bias=True),
        **slots_of("rows_norm", "visual.post_layernorm", "v.post_ln", (c,)),
        **slots_of(
            "merger", "visual.downsample", "mm.patch_merger", (e, encoder.merged_channels), has_bias=True, flat=True
        ),
        **slots_of("projection", f"{merger}.proj", "mm.model.fc", (e, e)),
        **slots_of("merged_norm", f"{merger}.post_projection_norm", "mm.post_norm", (e,), has_bias=True),
        "gate_up": _both(merger, "mm.", "weight", (f, e)),
        **slots_of("down", f"{merger}.down_proj", "mm.down", (e, f)),
    }
    if not encoder.is_ocr:
        table, shape = "visual.embeddings.position_embedding", (encoder.side**2, c)
        top = {
            **top,
            **slots_of("norm", "visual.post_conv_layernorm", "v.norm_embd", (c,)),
            **slots_of("positions", table, "v.position_embd", shape),
        }
    return TensorTable(top, tuple(_layer(encoder, number) for number in range(encoder.layers)))


def _both(theirs: str, ggml: str, kind: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{theirs}.{part}_proj.{kind}", f"{ggml}{part}.{kind}", shape) for part in ("gate", "up"))


def _layer(encoder: GlmVisionEncoder, number: int) -> Slots:
    theirs, ggml, c, f = f"visual.blocks.{number}", f"v.blk.{number}", encoder.hidden_size, encoder.ffn_size
    has_bias, head = encoder.is_ocr, (c // encoder.heads,)
    slots: Slots = {
        **slots_of("norm", f"{theirs}.norm1", f"{ggml}.ln1", (c,)),
        **slots_of("qkv", f"{theirs}.attn.qkv", f"{ggml}.attn_qkv", (3 * c, c), has_bias=has_bias),
        **slots_of("out", f"{theirs}.attn.proj", f"{ggml}.attn_out", (c, c), has_bias=has_bias),
        **slots_of("ffn_norm", f"{theirs}.norm2", f"{ggml}.ln2", (c,)),
        "gate_up": _both(f"{theirs}.mlp", f"{ggml}.ffn_", "weight", (f, c)),
        **slots_of("down", f"{theirs}.mlp.down_proj", f"{ggml}.ffn_down", (c, f), has_bias=has_bias),
    }
    if not encoder.is_ocr:
        return slots
    return {
        **slots,
        **slots_of("q_norm", f"{theirs}.attn.q_norm", f"{ggml}.attn_q_norm", head),
        **slots_of("k_norm", f"{theirs}.attn.k_norm", f"{ggml}.attn_k_norm", head),
        "gate_up_bias": _both(f"{theirs}.mlp", f"{ggml}.ffn_", "bias", (f,)),
    }
