"""Qwen2.5-VL: in most layers the patches of a window see each other, in some all patches do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorSpec, TensorTable, slots_of
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.vision_encoders import VisionEncoder, _qwen
from polarlm.model_loaders.vision_encoders._padded import SIDE, pad
from polarlm.model_loaders.vision_encoders._vit import CLIP

MODEL_TYPES = ("qwen2_5_vl",)
PREFIXES = _qwen.PREFIXES
fit = _qwen.fit


@dataclass(frozen=True)
class WindowVisionEncoder(_qwen.QwenVisionEncoder):
    window: int  # rows of a prompt along the side of a window
    whole: tuple[int, ...]  # the layers without windows

    @property
    def padded_size(self) -> int:
        """`ffn_size` with zeros after it, for GPUs."""
        return -(-self.ffn_size // SIDE) * SIDE


def configure(fields: Fields, preprocessor: Fields) -> VisionEncoder:
    vision = fields.section("vision_config")
    assert vision is not None
    return _vision_encoder(vision, preprocessor, tuple(vision.integers("fullatt_block_indexes") or (7, 15, 23, 31)))


def _from_mmproj(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> VisionEncoder:
    vision = _qwen.fields_of_mmproj(fields, shapes)
    layers, every = vision.integer("depth"), vision.integer("n_wa_pattern")
    return _vision_encoder(vision, vision, tuple(range(every - 1, layers, every)))


PROJECTORS = {"qwen2.5vl_merger": _from_mmproj}


def _vision_encoder(vision: Fields, preprocessor: Fields, whole: tuple[int, ...]) -> VisionEncoder:
    vision.require("hidden_act", "silu")
    settings = _qwen.settings(
        vision,
        preprocessor,
        patch=14,
        pixels=(56 * 56, 28 * 28 * 16384),
        **CLIP,
    )
    window = vision.integer("window_size", 112) // (settings["patch"] * settings["merge"])
    return WindowVisionEncoder(kind="qwen2_5_vl", **settings, window=max(1, window), whole=whole)


def tensors(encoder: WindowVisionEncoder) -> TensorTable:
    c, merged_channels = encoder.hidden_size, encoder.merged_channels
    top = {
        **_qwen.patches_slot(encoder, has_bias=False),
        **slots_of("merger_norm", "visual.merger.ln_q", "v.post_ln", (c,)),
        **slots_of("merger_in", "visual.merger.mlp.0", "mm.0", (merged_channels, merged_channels), has_bias=True),
        **slots_of("merger_out", "visual.merger.mlp.2", "mm.2", (encoder.outputs, merged_channels), has_bias=True),
    }
    return TensorTable(top, tuple(_layer(encoder, number) for number in range(encoder.layers)))


def _layer(encoder: WindowVisionEncoder, number: int) -> Slots:
    theirs, ggml, c, f = f"visual.blocks.{number}", f"v.blk.{number}", encoder.hidden_size, encoder.padded_size
    slots: dict[str, tuple[TensorSpec, ...]] = {
        **slots_of("norm", f"{theirs}.norm1", f"{ggml}.ln1", (c,)),
        **slots_of("out", f"{theirs}.attn.proj", f"{ggml}.attn_out", (c, c), has_bias=True),
        **slots_of("ffn_norm", f"{theirs}.norm2", f"{ggml}.ln2", (c,)),
        **slots_of("down", f"{theirs}.mlp.down_proj", f"{ggml}.ffn_down", (c, f), has_bias=True),
    }
    for suffix, kind, inputs in (("", "weight", (c,)), ("_bias", "bias", ())):
        slots[f"qkv{suffix}"] = tuple(
            TensorSpec(f"{theirs}.attn.qkv.{kind}", f"{ggml}.attn_{part}.{kind}", (c, *inputs)).as_parts((c,) * 3, i)
            for i, part in enumerate("qkv")
        )
        slots[f"gate_up{suffix}"] = tuple(
            TensorSpec(f"{theirs}.mlp.{part}_proj.{kind}", f"{ggml}.ffn_{part}.{kind}", (f, *inputs))
            for part in ("gate", "up")
        )
    return slots


def take_apart(encoder: WindowVisionEncoder, file_tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The tensors of the network, with zeros after their rows, and after the values of a row."""
    tensors, padding = dict(_qwen.take_apart(encoder, file_tensors)), encoder.padded_size - encoder.ffn_size
    for name, tensor in tensors.items() if padding else ():
        shape = tuple(size + padding * (size == encoder.ffn_size) for size in tensor.shape)
        if ".mlp." in name and shape != tensor.shape:
            tensors[name] = pad(tensor, shape)
    return tensors
