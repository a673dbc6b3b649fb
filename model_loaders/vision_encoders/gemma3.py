"""Gemma 3: SigLIP, which takes images of one size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorSpec, TensorTable, slots_of
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.vision_encoders import ImageShape, _vit

MODEL_TYPES = ("gemma3",)
PREFIXES = _vit.SIGLIP_PREFIXES
_PATCHES, _PROJECTION = "vision_tower.embeddings.patch_embedding", "multi_modal_projector.mm_input_projection_weight"


@dataclass(frozen=True)
class Gemma3VisionEncoder(_vit.PatchVisionEncoder):
    side: int  # patches along a side of an image


def configure(fields: Fields, preprocessor: Fields) -> Gemma3VisionEncoder:
    vision, outputs = _vit.parts_of(fields)
    encoder, rows = _vision_encoder(vision, preprocessor, outputs), fields.integer("mm_tokens_per_image", 256)
    merge = encoder.side // math.isqrt(rows)
    if not merge or encoder.side**2 != rows * merge**2:
        raise fields.refuse("mm_tokens_per_image", f"but an image has {encoder.side} × {encoder.side} patches")
    return replace(encoder, merge=merge)


def _from_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> Gemma3VisionEncoder:
    vision = fields.with_file_keys(_vit.KEYS)
    return _vision_encoder(vision, vision, shapes.get("mm.input_projection.weight", (0,))[-1])


PROJECTORS = {"gemma3": _from_mmproj}


def _vision_encoder(vision: Fields, preprocessor: Fields, outputs: int) -> Gemma3VisionEncoder:
    vision.require("hidden_act", "gelu_pytorch_tanh")
    for key in ("image_mean", "image_std"):
        preprocessor.require(key, [0.5] * 3)
    settings = _vit.settings(vision, merge=4, eps="layer_norm_eps", unit=1)
    return Gemma3VisionEncoder(
        kind="gemma3",
        outputs=outputs,
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        filter="BILINEAR",
        **settings,
        side=vision.integer("image_size", maximum=2**14) // settings["patch"],
    )


def fit(encoder: Gemma3VisionEncoder, width: int, height: int) -> ImageShape:
    side = encoder.side // encoder.merge
    return ImageShape(encoder.side * encoder.patch, encoder.side * encoder.patch, side**2, (side, side))


def tensors(encoder: Gemma3VisionEncoder) -> TensorTable:
    c = encoder.hidden_size
    patches, norm = (c, encoder.padded_size), "multi_modal_projector.mm_soft_emb_norm.weight"
    top: Slots = {
        **slots_of("patches", _PATCHES, "v.patch_embd", patches, has_bias=True),
        **slots_of("positions", "vision_tower.embeddings.position_embedding", "v.position_embd", (encoder.side**2, c)),
        **slots_of("norm", "vision_tower.post_layernorm", "v.post_ln", (c,), has_bias=True),
        "rows_norm": (TensorSpec(norm, "mm.soft_emb_norm.weight", (c,), offset=1.0),),
        "projection": (TensorSpec(_PROJECTION, "mm.input_projection.weight", (encoder.outputs, c)),),
    }
    return TensorTable(top, tuple(_vit.plain_layer(encoder, number) for number in range(encoder.layers)))


def take_apart(encoder: Gemma3VisionEncoder, file_tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Patches with zeros after their values, and the projection (out, in); older files of llama.cpp's have the names of
    up and down swapped."""
    tensors = _vit.with_padded_patches(encoder, file_tensors, f"{_PATCHES}.weight")
    if _PROJECTION in tensors:
        tensors[_PROJECTION] = tensors[_PROJECTION].transpose()
    c, f = encoder.hidden_size, encoder.ffn_size
    for number in range(encoder.layers):
        up, down = (f"vision_tower.encoder.layers.{number}.mlp.fc{i}" for i in (1, 2))
        if f"{up}.weight" in file_tensors and file_tensors[f"{up}.weight"].shape == (c, f) != (f, c):
            swapped = {f"{a}.{kind}": f"{b}.{kind}" for a, b in ((up, down), (down, up)) for kind in ("weight", "bias")}
            tensors |= {name: file_tensors[other] for name, other in swapped.items() if other in file_tensors}
    return tensors
