"""Pixtral, in Mistral Small 3.1 and 3.2, Magistral and Ministral 3: RoPE in two dimensions, for images of any shape.

A token stands between lines of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from polarlm.model_loaders.config import Attention
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorSpec, TensorTable, slots_of
from polarlm.model_loaders.vision_encoders import ImageShape, _vit

MODEL_TYPES = ("mistral3",)
TEXT_FAMILIES = (("llama", 131_072),)  # of Mistral Small 3
PREFIXES = {f"model.{part}.": f"{part}." for part in ("vision_tower", "multi_modal_projector")}
INTERLEAVED = True
_PATCHES, _PROJECTOR = "vision_tower.patch_conv", "multi_modal_projector"
take_apart = partial(_vit.with_padded_patches, name=f"{_PATCHES}.weight")
_KEYS = {**_vit.KEYS, "pooling_kernel_size": "spatial_merge_size"}


@dataclass(frozen=True)
class PixtralVisionEncoder(_vit.PatchVisionEncoder):
    line_end: str  # the token between lines of rows
    theta: float
    longest: int  # pixels along a side, at most
    rows_eps: float  # of the norm before patches become rows


def configure(fields: Fields, preprocessor: Fields) -> PixtralVisionEncoder:
    fields.require("projector_hidden_act", "gelu")
    fields.require("multimodal_projector_bias", False)
    fields.require("vision_feature_layer", -1)
    vision, outputs = _vit.parts_of(fields)
    vision = vision.with_values({"pooling_kernel_size": fields.integer("spatial_merge_size", 2, maximum=64)})
    text = fields.section("text_config") or fields
    return _vision_encoder(vision, preprocessor, outputs, text.positive("rms_norm_eps", 1e-5))


def _from_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> PixtralVisionEncoder:
    vision = fields.with_file_keys(_KEYS)
    outputs = shapes.get("mm.2.weight", (0,))[0]
    return _vision_encoder(vision, vision, outputs, vision.positive("rms_norm_eps", 1e-5))


PROJECTORS = {"pixtral": _from_mmproj}


def _vision_encoder(vision: Fields, preprocessor: Fields, outputs: int, rows_eps: float) -> PixtralVisionEncoder:
    vision.require("hidden_act", "silu")
    settings = _vit.settings(vision.with_defaults({"rms_norm_eps": 1e-5}), merge=2, eps="rms_norm_eps", unit=4)
    vision.require("head_dim", settings["hidden_size"] // settings["heads"])
    size = preprocessor.section("size") or preprocessor
    return PixtralVisionEncoder(
        kind="pixtral",
        outputs=outputs,
        before="",
        after="[IMG_END]",
        filter="BICUBIC",
        **settings,
        line_end="[IMG_BREAK]",
        theta=(vision.section("rope_parameters") or vision).positive("rope_theta", 10_000.0),
        longest=size.integer("longest_edge", vision.integer("image_size", 1540), maximum=2**14),
        rows_eps=rows_eps,
        **_vit.colours(preprocessor, **_vit.CLIP),
    )


def fit(encoder: PixtralVisionEncoder, width: int, height: int) -> ImageShape:
    """The image, made smaller if it is longer than `encoder.longest`; both sides become multiples of a row's pixels."""
    side, shrunk = encoder.patch * encoder.merge, max(1.0, width / encoder.longest, height / encoder.longest)
    across, down = (max(1, math.ceil(math.floor(pixels / shrunk) / side)) for pixels in (width, height))
    texts = tuple((line * across, encoder.line_end) for line in range(1, down))
    return ImageShape(across * side, down * side, down * across, (down, across), texts)


def tensors(encoder: PixtralVisionEncoder) -> TensorTable:
    c, e = encoder.hidden_size, encoder.outputs
    merger = f"{_PROJECTOR}.patch_merger.merging_layer"
    top: Slots = {
        **slots_of("patches", _PATCHES, "v.patch_embd", (c, encoder.padded_size)),
        **slots_of("norm", "vision_tower.ln_pre", "v.pre_ln", (c,)),
        **slots_of("rows_norm", f"{_PROJECTOR}.norm", "mm.input_norm", (c,)),
        **slots_of("merger", merger, "mm.patch_merger", (c, encoder.merged_channels)),
        **slots_of("first", f"{_PROJECTOR}.linear_1", "mm.1", (e, c)),
        **slots_of("second", f"{_PROJECTOR}.linear_2", "mm.2", (e, e)),
    }
    return TensorTable(top, tuple(_layer(encoder, number) for number in range(encoder.layers)))


def _layer(encoder: PixtralVisionEncoder, number: int) -> Slots:
    theirs, ggml = f"vision_tower.transformer.layers.{number}", f"v.blk.{number}"
    c, f, heads = encoder.hidden_size, encoder.ffn_size, encoder.heads
    q, k, v = (TensorSpec(f"{theirs}.attention.{x}_proj.weight", f"{ggml}.attn_{x}.weight", (c, c)) for x in "qkv")
    attention = Attention(heads, heads, c // heads, None)
    gate, up = (
        TensorSpec(f"{theirs}.feed_forward.{x}_proj.weight", f"{ggml}.ffn_{x}.weight", (f, c)) for x in ("gate", "up")
    )
    return {
        **slots_of("norm", f"{theirs}.attention_norm", f"{ggml}.ln1", (c,)),
        "qkv": (*(replace(one, rotated_heads=heads, attention=attention) for one in (q, k)), v),
        **slots_of("out", f"{theirs}.attention.o_proj", f"{ggml}.attn_out", (c, c)),
        **slots_of("ffn_norm", f"{theirs}.ffn_norm", f"{ggml}.ln2", (c,)),
        "gate_up": (gate, up),
        **slots_of("down", f"{theirs}.feed_forward.down_proj", f"{ggml}.ffn_down", (c, f)),
    }
