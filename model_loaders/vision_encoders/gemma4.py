"""Gemma 4: a vision encoder of decoder-like layers, for images of any shape. Positions are learned, and in RoPE.

In E2B and E4B the inputs and outputs of products in layers are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from polarlm.model_loaders.config import Attention
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorSpec, TensorTable, slots_of
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.vision_encoders import ImageShape, _vit

MODEL_TYPES = ("gemma4",)
PREFIXES = {f"model.{part}.": f"{part}." for part in ("vision_tower", "embed_vision")}
PRODUCTS = {  # of a layer, by slot: names in config.json's files and in llama.cpp's
    **{part: (f"self_attn.{part}_proj", f"attn_{part}") for part in "qkv"},
    "out": ("self_attn.o_proj", "attn_out"),
    **{part: (f"mlp.{part}_proj", f"ffn_{part}") for part in ("gate", "up", "down")},
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_PATCHES = "vision_tower.patch_embedder.input_proj"
_POSITIONS = "vision_tower.patch_embedder.position_embedding_table"


@dataclass(frozen=True)
class Gemma4VisionEncoder(_vit.PatchVisionEncoder):
    head_dim: int  # D
    theta: float
    positions: int  # along a side
    rows: int  # at most, of an image
    is_standardized: bool  # whether a row has a mean and a scale
    is_bounded: bool
    channels_first: bool  # of the values of a patch


def configure(fields: Fields, preprocessor: Fields) -> Gemma4VisionEncoder:
    return _vision_encoder(*_vit.parts_of(fields), preprocessor, channels_first=False)


def _from_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> Gemma4VisionEncoder:
    fields_of_tensors = {
        "head_dim": shapes.get("v.blk.0.attn_q_norm.weight", (0,))[0],
        "position_embedding_size": shapes.get("v.position_embd.weight", (0, 0))[-2],
        "standardize": "v.std_bias" in shapes,
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in shapes,
    }
    vision = fields.with_file_keys(_vit.KEYS).with_values(fields_of_tensors)
    return _vision_encoder(vision, shapes.get("mm.input_projection.weight", (0,))[0], vision, channels_first=True)


PROJECTORS = {"gemma4v": _from_mmproj}


def _vision_encoder(vision: Fields, outputs: int, preprocessor: Fields, *, channels_first: bool) -> Gemma4VisionEncoder:
    vision.require("hidden_activation", "gelu_pytorch_tanh")
    settings = _vit.settings(vision, merge=3, eps="rms_norm_eps")
    vision.require("num_key_value_heads", settings["heads"])
    head_dim, positions = vision.integer("head_dim"), vision.integer("position_embedding_size", 10 * 1024)
    if head_dim % 4:
        raise vision.refuse("head_dim", "but must be a multiple of 4, for RoPE in two dimensions")
    return Gemma4VisionEncoder(
        kind="gemma4",
        outputs=outputs,
        before="<|image>",
        after="<image|>",
        filter="BICUBIC",
        **settings,
        head_dim=head_dim,
        theta=(vision.section("rope_parameters") or vision).positive("rope_theta", 100.0),
        positions=positions,
        rows=min(
            preprocessor.integer("max_soft_tokens", 280), positions // settings["merge"]
        ),  # maybe all along a side
        is_standardized=vision.flag("standardize", False),
        is_bounded=vision.flag("use_clipped_linears", False),
        channels_first=channels_first,
    )


def fit(encoder: Gemma4VisionEncoder, width: int, height: int) -> ImageShape:
    """The largest size with at most `encoder.rows` rows that keeps the image's shape as far as it can."""
    side = encoder.patch * encoder.merge
    factor = math.sqrt(encoder.rows * side**2 / (width * height))
    down, across = (math.floor(factor * pixels / side) for pixels in (height, width))
    if not down:
        down, across = 1, min(width // height, encoder.rows)
    elif not across:
        down, across = min(height // width, encoder.rows), 1
    return ImageShape(across * side, down * side, down * across, (down, across))


def tensors(encoder: Gemma4VisionEncoder) -> TensorTable:
    c = encoder.hidden_size
    top: Slots = {
        **slots_of("patches", _PATCHES, "v.patch_embd", (c, encoder.padded_size)),
        "positions": (TensorSpec(_POSITIONS, "v.position_embd.weight", (2 * encoder.positions, c)),),
        **slots_of("projection", "embed_vision.embedding_projection", "mm.input_projection", (encoder.outputs, c)),
    }
    for name in ("std_bias", "std_scale") if encoder.is_standardized else ():
        top = {**top, name: (TensorSpec(f"vision_tower.{name}", f"v.{name}", (c,)),)}
    return TensorTable(top, tuple(_layer(encoder, number) for number in range(encoder.layers)))


def _layer(encoder: Gemma4VisionEncoder, number: int) -> Slots:
    theirs, ggml = f"vision_tower.encoder.layers.{number}", f"v.blk.{number}"
    c, f, heads, dim = encoder.hidden_size, encoder.ffn_size, encoder.heads, encoder.head_dim
    shapes = dict.fromkeys("qkv", (heads * dim, c)) | {"out": (c, heads * dim), "down": (c, f)}
    # Each half of a head is rotated by itself.
    with_rope = partial(replace, attention=Attention(heads, heads, dim, None, rotary_dim=dim // 2))
    slots: dict[str, tuple[TensorSpec, ...]] = {}
    for slot, (name, label) in PRODUCTS.items():
        slots |= slots_of(slot, f"{theirs}.{name}.linear", f"{ggml}.{label}", shapes.get(slot, (f, c)))
    for slot in "qk":
        slots[slot] = (with_rope(slots[slot][0], rotated_heads=heads),)
        norm = TensorSpec(f"{theirs}.self_attn.{slot}_norm.weight", f"{ggml}.attn_{slot}_norm.weight", (dim,))
        slots[f"{slot}_norm"] = (with_rope(norm, rotated_heads=1),)
    for slot, name, label in (
        ("norm", "input", "ln1"),
        ("post_norm", "post_attention", "attn_post_norm"),
        ("ffn_norm", "pre_feedforward", "ln2"),
        ("ffn_post_norm", "post_feedforward", "ffn_post_norm"),
    ):
        slots |= slots_of(slot, f"{theirs}.{name}_layernorm", f"{ggml}.{label}", (c,))
    if encoder.is_bounded:
        slots["bounds"] = tuple(
            TensorSpec(f"{theirs}.{name}.{bound}", f"{ggml}.{label}.{bound}", (1,), flat=True)
            for name, label in PRODUCTS.values()
            for bound in _BOUNDS
        )
    return slots


def take_apart(encoder: Gemma4VisionEncoder, file_tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The positions of columns and of rows are one matrix."""
    tensors, positions = (
        _vit.with_padded_patches(encoder, file_tensors, f"{_PATCHES}.weight"),
        file_tensors.get(_POSITIONS),
    )
    if positions is not None and positions.shape == (2, encoder.positions, encoder.hidden_size):
        tensors[_POSITIONS] = replace(positions, shape=(2 * encoder.positions, encoder.hidden_size))
    return tensors
