"""Gemma 4: a tower of decoder-like layers, for images of any shape. Positions are learned, and in RoPE.

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
from polarlm.model_loaders.towers import ImageShape, _gemma

MODEL_TYPES = ("gemma4",)
PREFIXES = {f"model.{part}.": f"{part}." for part in ("vision_tower", "embed_vision")}
PRODUCTS = {  # of a layer, by slot: names in config.json's files and in llama.cpp's
    **{part: (f"self_attn.{part}_proj", f"attn_{part}") for part in "qkv"},
    "out": ("self_attn.o_proj", "attn_out"),
    **{part: (f"mlp.{part}_proj", f"ffn_{part}") for part in ("gate", "up", "down")},
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_PATCHES = "vision_tower.patch_embedder.input_proj"
_POSITIONS, _THETA = "vision_tower.patch_embedder.position_embedding_table", 100.0


@dataclass(frozen=True)
class Gemma4Tower(_gemma.GemmaTower):
    kv_heads: int
    head_dim: int  # D
    theta: float
    positions: int  # along a side
    rows: int  # at most, of an image
    is_standardized: bool  # whether a row has a mean and a scale
    is_bounded: bool
    channels_first: bool = False  # of the values of a patch


def configure(fields: Fields, prepared: Fields) -> Gemma4Tower:
    vision = fields.section("vision_config")
    assert vision is not None
    rope = vision.section("rope_parameters") or Fields({}, vision.where)
    rope.require("rope_type", "axial")
    heads = vision.integer("num_attention_heads")
    return _tower(
        vision.completed({"num_key_value_heads": heads, "patch_size": 16}),
        prepared,
        outputs=_gemma.outputs_of(fields),
        merge=vision.integer("pooling_kernel_size", 3, maximum=64),
        theta=rope.positive("rope_theta", _THETA),
        is_standardized=vision.flag("standardize", False),
        is_bounded=vision.flag("use_clipped_linears", False),
    )


def _of_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> Gemma4Tower:
    vision = fields.translated(_gemma.KEYS)
    dim = shapes.get("v.blk.0.attn_q_norm.weight", (1,))[0]
    of_tensors = {
        "head_dim": dim,
        "num_key_value_heads": shapes.get("v.blk.0.attn_k.weight", (0,))[0] // dim,
        "position_embedding_size": shapes.get("v.position_embd.weight", (0, 0))[-2],
    }
    return _tower(
        vision.replaced(of_tensors),
        vision,
        outputs=shapes.get("mm.input_projection.weight", (0,))[0],
        merge=vision.integer("merge", 3, maximum=64),
        theta=_THETA,
        is_standardized="v.std_bias" in shapes,
        is_bounded="v.blk.0.attn_q.input_min" in shapes,
        channels_first=True,
    )


PROJECTORS = {"gemma4v": _of_mmproj}


def _tower(
    vision: Fields,
    prepared: Fields,
    *,
    outputs: int,
    merge: int,
    theta: float,
    is_standardized: bool,
    is_bounded: bool,
    channels_first: bool = False,
) -> Gemma4Tower:
    vision.require("hidden_activation", "gelu_pytorch_tanh")
    settings, head_dim = _gemma.settings(vision, prepared, filter=3), vision.integer("head_dim", maximum=4096)
    if head_dim % 4:
        raise vision.refuse("head_dim", "but must be a multiple of 4, for RoPE in two dimensions")
    positions = vision.integer("position_embedding_size", 10 * 1024)
    return Gemma4Tower(
        kind="gemma4",
        outputs=outputs,
        before="<|image>",
        after="<image|>",
        **settings,
        merge=merge,
        eps=vision.positive("rms_norm_eps", 1e-6),
        kv_heads=vision.integer("num_key_value_heads", maximum=settings["heads"]),
        head_dim=head_dim,
        theta=theta,
        positions=positions,
        rows=min(prepared.integer("max_soft_tokens", 280), positions // merge),  # all may be along one side
        is_standardized=is_standardized,
        is_bounded=is_bounded,
        channels_first=channels_first,
    )


def fit(tower: Gemma4Tower, width: int, height: int) -> ImageShape:
    """The largest size with at most `tower.rows` rows that keeps the image's shape as far as it can."""
    side = tower.patch * tower.merge
    factor = math.sqrt(tower.rows * side**2 / (width * height))
    down, across = (math.floor(factor * pixels / side) for pixels in (height, width))
    if not down:
        down, across = 1, min(width // height, tower.rows)
    elif not across:
        down, across = min(height // width, tower.rows), 1
    return ImageShape(across * side, down * side, down * across, (down, across))


def tensors(tower: Gemma4Tower) -> TensorTable:
    c = tower.hidden_size
    top: Slots = {
        **slots_of("patches", _PATCHES, "v.patch_embd", (c, tower.padded)),
        "positions": (TensorSpec(_POSITIONS, "v.position_embd.weight", (2 * tower.positions, c)),),
        **slots_of("projection", "embed_vision.embedding_projection", "mm.input_projection", (tower.outputs, c)),
    }
    for name in ("std_bias", "std_scale") if tower.is_standardized else ():
        top = {**top, name: (TensorSpec(f"vision_tower.{name}", f"v.{name}", (c,)),)}
    return TensorTable(top, tuple(_layer(tower, number) for number in range(tower.layers)))


def _layer(tower: Gemma4Tower, number: int) -> Slots:
    theirs, ggml = f"vision_tower.encoder.layers.{number}", f"v.blk.{number}"
    c, f, heads, kv_heads, dim = tower.hidden_size, tower.ffn_size, tower.heads, tower.kv_heads, tower.head_dim
    shapes = {
        **{"q": (heads * dim, c), "k": (kv_heads * dim, c), "v": (kv_heads * dim, c), "out": (c, heads * dim)},
        **{"gate": (f, c), "up": (f, c), "down": (c, f)},
    }
    # Each half of a head is rotated by itself.
    rotated = partial(replace, attention=Attention(heads, kv_heads, dim, None, rotary_dim=dim // 2))
    slots = {
        slot: slots_of(slot, f"{theirs}.{name}.linear", f"{ggml}.{label}", shapes[slot])[slot]
        for slot, (name, label) in PRODUCTS.items()
    }
    for slot, count in (("q", heads), ("k", kv_heads)):
        slots[slot] = (rotated(slots[slot][0], rotated_heads=count),)
        norm = TensorSpec(f"{theirs}.self_attn.{slot}_norm.weight", f"{ggml}.attn_{slot}_norm.weight", (dim,))
        slots[f"{slot}_norm"] = (rotated(norm, rotated_heads=1),)
    for slot, name, label in (
        ("norm", "input", "ln1"),
        ("post_norm", "post_attention", "attn_post_norm"),
        ("ffn_norm", "pre_feedforward", "ln2"),
        ("ffn_post_norm", "post_feedforward", "ffn_post_norm"),
    ):
        slots |= slots_of(slot, f"{theirs}.{name}_layernorm", f"{ggml}.{label}", (c,))
    if tower.is_bounded:
        slots["bounds"] = tuple(
            TensorSpec(f"{theirs}.{name}.{bound}", f"{ggml}.{label}.{bound}", (1,), flat=True)
            for name, label in PRODUCTS.values()
            for bound in _BOUNDS
        )
    return slots


def take_apart(tower: Gemma4Tower, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The positions of columns and of rows are one matrix."""
    tensors, positions = _gemma.with_padded_patches(tower, stored, f"{_PATCHES}.weight"), stored.get(_POSITIONS)
    if positions is not None and positions.shape == (2, tower.positions, tower.hidden_size):
        tensors[_POSITIONS] = replace(positions, shape=(2 * tower.positions, tower.hidden_size))
    return tensors
