"""LFM2-VL: SigLIP 2 for images of any shape, whose learned positions are resized.

Large images are made smaller, and not cut into tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorTable, slots_of
from polarlm.model_loaders.vision_encoders import ImageShape, _vit

MODEL_TYPES = ("lfm2_vl", "lfm2")
PREFIXES = _vit.SIGLIP_PREFIXES
_EMBEDDINGS, _PROJECTOR = "vision_tower.embeddings", "multi_modal_projector"
take_apart = partial(_vit.with_padded_patches, name=f"{_EMBEDDINGS}.patch_embedding.weight")


@dataclass(frozen=True)
class Lfm2VlVisionEncoder(_vit.PatchVisionEncoder):
    side: int  # positions along a side
    pixels: tuple[int, int]  # least and most of an image
    most_whole: float  # pixels of an image beyond which the model's own processor cuts it into tiles
    projected: int  # channels between the last two products
    norms_rows: bool
    channels_first: bool  # of the values of a patch


def configure(fields: Fields, preprocessor: Fields) -> Lfm2VlVisionEncoder:
    for key, value in (("projector_hidden_act", "gelu"), ("projector_bias", True), ("vision_feature_layer", -1)):
        fields.require(key, value)
    vision, outputs = _vit.parts_of(fields)
    values = {
        "pooling_kernel_size": fields.integer("downsample_factor", 2, maximum=64),
        "projected": fields.integer("projector_hidden_size", 2560),
        "norms_rows": fields.flag("projector_use_layernorm", True),
    }
    return _vision_encoder(vision.with_values(values), preprocessor, outputs, channels_first=False)


def _from_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> Lfm2VlVisionEncoder:
    sizes = {"projected": "mm.1.weight", "outputs": "mm.2.weight", "num_patches": "v.position_embd.weight"}
    values = {ours: shapes.get(label, (None,))[0] for ours, label in sizes.items()}
    vision = fields.with_file_keys(_vit.KEYS).with_values({**values, "norms_rows": "mm.input_norm.weight" in shapes})
    return _vision_encoder(vision, vision, vision.integer("outputs"), channels_first=True)


PROJECTORS = {"lfm2": _from_mmproj}


def _vision_encoder(vision: Fields, preprocessor: Fields, outputs: int, *, channels_first: bool) -> Lfm2VlVisionEncoder:
    vision.require("hidden_act", "gelu_pytorch_tanh")
    settings = _vit.settings(vision, merge=2, eps="layer_norm_eps", unit=1)
    least, most = (preprocessor.integer(f"{end}_image_tokens", rows) for end, rows in (("min", 64), ("max", 256)))
    area = (settings["patch"] * settings["merge"]) ** 2
    return Lfm2VlVisionEncoder(
        kind="lfm2_vl",
        outputs=outputs,
        before="<|image_start|>",
        after="<|image_end|>",
        filter="BILINEAR",
        **settings,
        side=_vit.side_of(vision, "num_patches", 256),
        pixels=(least * area, max(least, most) * area),
        most_whole=(
            max(least, most) * area * preprocessor.number("max_pixels_tolerance", 2.0)
            if preprocessor.flag("do_image_splitting", True)
            else math.inf
        ),
        projected=vision.integer("projected"),
        norms_rows=vision.flag("norms_rows", True),
        channels_first=channels_first,
        **_vit.colours(preprocessor, mean=[0.5] * 3, std=[0.5] * 3),
    )


def loss(encoder: Lfm2VlVisionEncoder, width: int, height: int) -> str:
    if width * height <= encoder.most_whole:
        return ""
    shape = fit(encoder, width, height)
    return f"it is read at {shape.width} × {shape.height} pixels, and not in tiles, which its model was trained on, too"


def fit(encoder: Lfm2VlVisionEncoder, width: int, height: int) -> ImageShape:
    return _vit.fit_area(encoder, encoder.pixels, width, height)


def tensors(encoder: Lfm2VlVisionEncoder) -> TensorTable:
    c, between, merged = encoder.hidden_size, encoder.projected, encoder.merged_channels
    patches = c, encoder.padded_size
    top: Slots = {
        **slots_of("patches", f"{_EMBEDDINGS}.patch_embedding", "v.patch_embd", patches, has_bias=True),
        **slots_of("positions", f"{_EMBEDDINGS}.position_embedding", "v.position_embd", (encoder.side**2, c)),
        **slots_of("norm", "vision_tower.post_layernorm", "v.post_ln", (c,), has_bias=True),
        **slots_of("first", f"{_PROJECTOR}.linear_1", "mm.1", (between, merged), has_bias=True),
        **slots_of("second", f"{_PROJECTOR}.linear_2", "mm.2", (encoder.outputs, between), has_bias=True),
    }
    if encoder.norms_rows:
        top = {**top, **slots_of("rows_norm", f"{_PROJECTOR}.layer_norm", "mm.input_norm", (merged,), has_bias=True)}
    return TensorTable(top, tuple(_vit.plain_layer(encoder, number) for number in range(encoder.layers)))
