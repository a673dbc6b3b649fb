"""What families for images have in common: the text part of a configuration, and RoPE with sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from polarlm.model_loaders.config import Attention, ModelConfig
from polarlm.model_loaders.fields import Fields

SECTIONS_KEY = {"mrope_section": "rope.dimension_sections"}  # for `GgufLayout`


def text_part(fields: Fields) -> Fields:
    """The text part of a configuration; the sections of RoPE are no kind of their own."""
    fields = fields.section("text_config") or fields
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.section(key)
        kinds = [] if rope is None else [one for one in ("type", "rope_type") if rope.value(one) == "mrope"]
        if rope is not None and kinds:
            values = {name: rope.value(name) for name in rope.present()}
            fields = fields.with_values({key: {**values, **dict.fromkeys(kinds, "default")}})
    return fields


def with_sections(
    config: ModelConfig, fields: Fields, default: Sequence[int], *, take_turns: bool = True
) -> ModelConfig:
    """The configuration, with the sections of RoPE. take_turns: see `RopeConfig.sections`."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or fields
    holder = fields if fields.has("mrope_section") else section
    sizes = (holder.integers("mrope_section") or [*default])[:3]
    pairs = config.attention.rotated // 2
    if len(sizes) < 3 or min(sizes) < 0 or not (take_turns or sum(sizes) == pairs):
        raise holder.refuse("mrope_section", f"but must be three numbers of the {pairs} pairs of channels")
    sections = cast("tuple[int, int, int]", tuple(sizes))

    def divide(one: Attention) -> Attention:
        rope = one.rope
        return replace(one, rope=rope and replace(rope, sections=sections, sections_take_turns=take_turns))

    return config.with_attention(divide)


def with_glm_sections(config: ModelConfig, fields: Fields) -> ModelConfig:
    """The configuration, with the sections of RoPE that GLM's models for images have. GGUF files say which ones are."""
    if not fields.text("model_type").startswith(("glm4v", "glm_ocr")) and not fields.has("mrope_section"):
        return config
    return with_sections(config, fields, (8, 12, 12), take_turns=False)
