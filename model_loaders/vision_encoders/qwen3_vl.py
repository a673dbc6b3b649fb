"""Qwen3-VL, and Qwen3.5, 3.6 and 3.8: learned positions, which are interpolated for an image of another size.

In Qwen3-VL rows are also made of patches after some of the layers; they are added to hidden states of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorTable, slots_of
from polarlm.model_loaders.vision_encoders import VisionEncoder, _qwen
from polarlm.model_loaders.vision_encoders._vit import side_of

_WITHOUT_MORE = ("qwen3_5", "qwen3_5_moe")
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", *_WITHOUT_MORE)
PREFIXES, fit, take_apart = _qwen.PREFIXES, _qwen.fit, _qwen.take_apart


@dataclass(frozen=True)
class DeepStackVisionEncoder(_qwen.QwenVisionEncoder):
    side: int  # positions along a side
    deep: tuple[int, ...]  # layers after which rows are made as well


def configure(fields: Fields, preprocessor: Fields) -> VisionEncoder:
    vision, default = fields.section("vision_config"), [8, 16, 24]
    assert vision is not None
    if fields.text("model_type") in _WITHOUT_MORE:
        return _vision_encoder(vision, preprocessor, ())
    deep = vision.with_defaults({"deepstack_visual_indexes": default}).integers("deepstack_visual_indexes")
    return _vision_encoder(vision, preprocessor, tuple(deep))


def _from_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> VisionEncoder:
    vision = _qwen.fields_of_mmproj(fields, shapes)
    depth = range(vision.integer("depth"))
    return _vision_encoder(
        vision, vision, tuple(layer for layer in depth if f"v.deepstack.{layer}.fc1.weight" in shapes)
    )


PROJECTORS = {"qwen3vl_merger": _from_mmproj}


def _vision_encoder(vision: Fields, preprocessor: Fields, deep: tuple[int, ...]) -> VisionEncoder:
    vision.require("hidden_act", "gelu_pytorch_tanh")
    side, half = side_of(vision, "num_position_embeddings", 2304), [0.5] * 3
    settings = _qwen.settings(vision, preprocessor, patch=16, pixels=(1 << 16, 1 << 24), mean=half, std=half)
    if not all(0 <= layer < settings["layers"] for layer in deep):
        raise vision.refuse("deepstack_visual_indexes", f"but there are {settings['layers']} layers")
    return DeepStackVisionEncoder(kind="qwen3_vl", **settings, side=side, deep=deep)


def tensors(encoder: DeepStackVisionEncoder) -> TensorTable:
    top = {
        **_qwen.patches_slot(encoder, has_bias=True),
        **slots_of("positions", "visual.pos_embed", "v.position_embd", (encoder.side**2, encoder.hidden_size)),
        **_merger(encoder, "merger", "visual.merger", ("v.post_ln", "mm.0", "mm.2"), encoder.hidden_size),
    }
    return TensorTable(top, tuple(_layer(encoder, number) for number in range(encoder.layers)))


def _merger(encoder: DeepStackVisionEncoder, slot: str, theirs: str, ggml: tuple[str, str, str], normed: int) -> Slots:
    """normed: the values that its norm takes together."""
    norm, first, second = ggml
    merged_channels = encoder.merged_channels
    return {
        **slots_of(f"{slot}_norm", f"{theirs}.norm", norm, (normed,), has_bias=True),
        **slots_of(f"{slot}_in", f"{theirs}.linear_fc1", first, (merged_channels, merged_channels), has_bias=True),
        **slots_of(f"{slot}_out", f"{theirs}.linear_fc2", second, (encoder.outputs, merged_channels), has_bias=True),
    }


def _layer(encoder: DeepStackVisionEncoder, number: int) -> Slots:
    theirs, ggml, c, f = f"visual.blocks.{number}", f"v.blk.{number}", encoder.hidden_size, encoder.ffn_size
    slots: Slots = {
        **slots_of("norm", f"{theirs}.norm1", f"{ggml}.ln1", (c,), has_bias=True),
        **slots_of("qkv", f"{theirs}.attn.qkv", f"{ggml}.attn_qkv", (3 * c, c), has_bias=True),
        **slots_of("out", f"{theirs}.attn.proj", f"{ggml}.attn_out", (c, c), has_bias=True),
        **slots_of("ffn_norm", f"{theirs}.norm2", f"{ggml}.ln2", (c,), has_bias=True),
        **slots_of("up", f"{theirs}.mlp.linear_fc1", f"{ggml}.ffn_up", (f, c), has_bias=True),
        **slots_of("down", f"{theirs}.mlp.linear_fc2", f"{ggml}.ffn_down", (c, f), has_bias=True),
    }
    if number not in encoder.deep:
        return slots
    ggml = f"v.deepstack.{number}"
    names = f"{ggml}.norm", f"{ggml}.fc1", f"{ggml}.fc2"
    place = f"visual.deepstack_merger_list.{encoder.deep.index(number)}"
    return {**slots, **_merger(encoder, "deep", place, names, encoder.merged_channels)}
