"""What vision encoders of Gemma's, Mistral's and Liquid's have in common: an image is cut into patches, of which
merge × merge become a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, slots_of
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.vision_encoders import ImageShape, VisionEncoder
from polarlm.model_loaders.vision_encoders._padded import SIDE, pad

MAX_SIZE, _MAX_RATIO, CHANNELS = 2**20, 200, 3
SIGLIP_PREFIXES = {
    **{f"{prefix}vision_tower.{old}": "vision_tower." for prefix in ("model.", "") for old in ("vision_model.", "")},
    "model.multi_modal_projector.": "multi_modal_projector.",
}
CLIP = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}  # of its pixels
KEYS = {  # of mmproj files, by the names of config.json
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rms_norm_eps": "attention.layer_norm_epsilon",
    "pooling_kernel_size": "projector.scale_factor",
}


@dataclass(frozen=True)
class PatchVisionEncoder(VisionEncoder):
    mean: tuple[float, ...] = field(default=(0.5,) * 3, kw_only=True)  # of a pixel, between 0 and 1
    std: tuple[float, ...] = field(default=(0.5,) * 3, kw_only=True)

    @property
    def patch_values(self) -> int:
        return CHANNELS * self.patch**2

    @property
    def padded_size(self) -> int:
        """`patch_values` with zeros after them, for GPUs."""
        return -(-self.patch_values // SIDE) * SIDE


def colours(preprocessor: Fields, *, mean: list[float], std: list[float]) -> dict[str, Any]:
    """`mean` and `std` of pixels between 0 and 1, tuples of three numbers. mean, std: defaults."""
    fields = preprocessor.with_defaults({"image_mean": mean, "image_std": std})
    values = {"mean": fields.numbers("image_mean", minimum=0.0), "std": fields.numbers("image_std")}
    if {len(one) for one in values.values()} != {CHANNELS}:
        raise fields.refuse("image_mean", f"but it and image_std must have {CHANNELS} numbers each")
    return values


def settings(vision: Fields, *, merge: int, eps: str, unit: int | None = None) -> dict[str, Any]:
    """Fields of a `PatchVisionEncoder`. merge: the default. eps: its key. unit: heads share `hidden_size`, in multiples
    of so many channels; None: they have a size of their own."""
    hidden_size, heads = (vision.integer(key, maximum=MAX_SIZE) for key in ("hidden_size", "num_attention_heads"))
    if unit is not None and hidden_size % (unit * heads):
        raise vision.refuse("hidden_size", f"which is not a multiple of {unit} for each of {heads} heads")
    return {
        "layers": vision.integer("num_hidden_layers", maximum=4096),
        "hidden_size": hidden_size,
        "heads": heads,
        "ffn_size": vision.integer("intermediate_size", maximum=MAX_SIZE),
        "patch": vision.integer("patch_size", 16, maximum=256),
        "merge": vision.integer("pooling_kernel_size", merge, maximum=64),
        "eps": vision.positive(eps, 1e-6),
    }


def side_of(fields: Fields, key: str, default: int | None = None, *, minimum: int = 1) -> int:
    """The positions along a side of a square that has as many as `key` says."""
    positions = fields.integer(key, default, minimum=minimum)
    if (side := math.isqrt(positions)) ** 2 != positions:
        raise fields.refuse(key, "which is not a square")
    return side


def parts_of(fields: Fields) -> tuple[Fields, int]:
    """What config.json says of the vision encoder, and E of the decoder."""
    vision = fields.section("vision_config")
    assert vision is not None
    return vision, (fields.section("text_config") or fields).integer("hidden_size", maximum=MAX_SIZE)


def with_padded_patches(
    encoder: PatchVisionEncoder, tensors: Mapping[str, StoredTensor], name: str
) -> dict[str, StoredTensor]:
    """`tensors`, in which the matrix of patches has zeros after its rows."""
    patches = tensors.get(name)
    if patches is None or math.prod(patches.shape) != encoder.hidden_size * encoder.patch_values:
        return dict(tensors)
    flat = replace(patches, shape=(encoder.hidden_size, encoder.patch_values))
    return {
        **tensors,
        name: pad(flat, (encoder.hidden_size, encoder.padded_size)) if encoder.padded_size > flat.columns else flat,
    }


def fit_area(encoder: VisionEncoder, bounds: tuple[int, int], width: int, height: int) -> ImageShape:
    """Both sides become multiples of a row's pixels, and their product stays within `bounds`; otherwise the image keeps
    its shape as far as it can. One that is extremely long is taken for less long."""
    side, (least, most) = encoder.patch * encoder.merge, bounds
    width, height = max(width, -(-height // _MAX_RATIO)), max(height, -(-width // _MAX_RATIO))
    across, down = (round(pixels / side) * side for pixels in (width, height))
    if across * down > most:
        shrink = math.sqrt(width * height / most)
        across, down = (max(side, math.floor(pixels / shrink / side) * side) for pixels in (width, height))
    elif across * down < least:
        grow = math.sqrt(least / (width * height))
        across, down = (math.ceil(pixels * grow / side) * side for pixels in (width, height))
    grid = down // side, across // side
    return ImageShape(across, down, grid[0] * grid[1], grid)


def plain_layer(encoder: VisionEncoder, number: int) -> Slots:
    """The tensors of a layer of SigLIP."""
    theirs, ggml = f"vision_tower.encoder.layers.{number}", f"v.blk.{number}"
    c, f = encoder.hidden_size, encoder.ffn_size
    qkv = [
        slots_of("qkv", f"{theirs}.self_attn.{part}_proj", f"{ggml}.attn_{part}", (c, c), has_bias=True)
        for part in "qkv"
    ]
    return {
        **slots_of("norm", f"{theirs}.layer_norm1", f"{ggml}.ln1", (c,), has_bias=True),
        **{slot: tuple(spec for part in qkv for spec in part[slot]) for slot in qkv[0]},
        **slots_of("out", f"{theirs}.self_attn.out_proj", f"{ggml}.attn_out", (c, c), has_bias=True),
        **slots_of("ffn_norm", f"{theirs}.layer_norm2", f"{ggml}.ln2", (c,), has_bias=True),
        **slots_of("up", f"{theirs}.mlp.fc1", f"{ggml}.ffn_up", (f, c), has_bias=True),
        **slots_of("down", f"{theirs}.mlp.fc2", f"{ggml}.ffn_down", (c, f), has_bias=True),
    }
