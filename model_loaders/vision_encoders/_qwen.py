"""What vision encoders of Qwen's and GLM's have in common: the sizes of images, and patches of two frames, which an
image has alike.

The patches of an image are in the order of the rows that they become: those of one row follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, slots_of
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.vision_encoders import ImageShape, VisionEncoder
from polarlm.model_loaders.vision_encoders._vit import CHANNELS, MAX_SIZE, colours, fit_area

FRAMES = 2
PREFIXES = {"model.visual.": "visual."}
PATCHES = "visual.patch_embed.proj.weight"
_KEYS = {  # of mmproj files, by the names of config.json
    "depth": "block_count",
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "min_pixels": "image_min_pixels",
    "max_pixels": "image_max_pixels",
}
_ROWS = {  # sizes that are the numbers of rows of their tensors
    "out_hidden_size": "mm.2.weight",
    "intermediate_size": "v.blk.0.ffn_up.weight",
    "num_position_embeddings": "v.position_embd.weight",
}


@dataclass(frozen=True)
class QwenVisionEncoder(VisionEncoder):
    pixels: tuple[int, int]  # least and most of an image
    mean: tuple[float, ...]  # of a pixel, between 0 and 1
    std: tuple[float, ...]

    @property
    def patch_values(self) -> int:
        return CHANNELS * FRAMES * self.patch**2


def settings(
    fields: Fields, preprocessor: Fields, *, patch: int, pixels: tuple[int, int], mean: list[float], std: list[float]
) -> dict[str, Any]:
    """The fields of a `QwenVisionEncoder` but its kind. fields: a `vision_config`. The others: the family's
    defaults."""
    heads = fields.integer("num_heads", 16)
    hidden_size = fields.integer("hidden_size", maximum=MAX_SIZE)
    if hidden_size % (4 * heads):
        raise fields.refuse("hidden_size", f"which is not a multiple of 4 for each of {heads} heads")
    fields.require("temporal_patch_size", FRAMES)
    size = preprocessor.section("size") or preprocessor
    bounds = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    least, most = (
        preprocessor.integer(key, size.integer(key, size.integer(other, default)))
        for (key, other), default in zip(bounds, pixels, strict=True)
    )
    return {
        "outputs": fields.integer("out_hidden_size", maximum=MAX_SIZE),
        "before": "<|vision_start|>",
        "after": "<|vision_end|>",
        "filter": "BICUBIC",
        "layers": fields.integer("depth", maximum=4096),
        "hidden_size": hidden_size,
        "heads": heads,
        "ffn_size": fields.integer("intermediate_size", maximum=MAX_SIZE),
        "patch": fields.integer("patch_size", patch, maximum=256),
        "merge": fields.integer("spatial_merge_size", 2, maximum=16),
        "eps": 1e-6,
        "pixels": (least, max(least, most)),
        **colours(preprocessor, mean=mean, std=std),
    }


def fields_of_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    """The metadata of an mmproj file with the keys of a `vision_config` and of preprocessor_config.json."""
    sizes = {ours: (shapes.get(label) or (None,))[0] for ours, label in _ROWS.items()}
    return fields.with_file_keys(_KEYS).with_values(sizes)


def fit(encoder: QwenVisionEncoder, width: int, height: int) -> ImageShape:
    return fit_area(encoder, encoder.pixels, width, height)


def patches_slot(encoder: QwenVisionEncoder, *, has_bias: bool) -> Slots:
    shape = encoder.hidden_size, encoder.patch_values
    return slots_of("patches", "visual.patch_embed.proj", "v.patch_embd", shape, has_bias=has_bias, flat=True)


def take_apart(encoder: QwenVisionEncoder, tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """In mmproj files each frame of patches has a tensor of its own."""
    second = tensors.get("v.patch_embd.weight.1")
    if second is None or (first := tensors.get(PATCHES)) is None or first.shape != second.shape:
        return tensors
    shape = encoder.hidden_size, encoder.patch_values
    return {**tensors, PATCHES: _Frames(first.source, first.label, shape, first.dtype, 0, frames=(first, second))}


@dataclass(frozen=True)
class _Frames(StoredTensor):
    """The matrices of both frames as one, whose columns are channels, and in them frames."""

    frames: tuple[StoredTensor, ...] = ()

    def raw(self, rows: slice) -> np.ndarray:
        count = rows.stop - rows.start
        halves = [
            replace(one, shape=(one.shape[0], self.columns // FRAMES)).raw(rows).reshape(count, CHANNELS, -1)
            for one in self.frames
        ]
        return np.stack(halves, axis=2).reshape(count, self.row_bytes)

    def expect(self) -> None:
        for one in self.frames:
            one.expect()
