"""Phi-3, 3.5 and Phi-4: q, k, v in one tensor and gate, up in another; longrope for long contexts.

Phi-4-mini has RoPE on a part of the channels.
"""

from __future__ import annotations

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, decoder, same_windows
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table
from polarlm.model_loaders.rope import rope_config

ARCHITECTURES = ("Phi3ForCausalLM",)
GGUF = GgufLayout(
    "phi3",
    keys={
        "sliding_window": "attention.sliding_window",
        "rotary_dim": "rope.dimension_count",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
    },
)
_NAMES = {
    **PRE_NORMS,
    **PROJECTIONS,
    "qkv": (("self_attn.qkv_proj", "attn_qkv"),),
    "gate_up": (("mlp.gate_up_proj", "ffn_up"),),
}
tensors = partial(tensor_table, names=_NAMES)


def configure(fields: Fields) -> ModelConfig:
    rope = rope_config(fields, fields.integer("max_position_embeddings"), longrope=True, partial=True)
    windows = same_windows(fields) if fields.number("sliding_window", 0.0) else ()
    config = decoder(fields, "phi3", rope=rope, partial_rope=True, windows=windows)
    pairs = config.attention.rotated // 2
    for key, factors in (("long_factor", rope.divisors), ("short_factor", rope.short_divisors)):
        if rope.kind == "longrope" and len(factors) != pairs:
            section = fields.section("rope_parameters") or fields.section("rope_scaling") or fields
            raise section.refuse(key, f"but RoPE needs one factor for each of {pairs} pairs of channels")
    return config
