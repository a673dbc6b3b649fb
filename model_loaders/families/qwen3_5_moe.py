"""Qwen3.5, 3.6 and 3.8 with a mixture of experts and a shared one with a gate: 35B-A3B, 122B-A10B.

RoPE has sections, which take turns.
"""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _gated_delta, _sections
from polarlm.model_loaders.families._experts import (
    EXPERTS,
    SHARED,
    SHARED_GGUF_KEYS,
    experts_with_shared,
    take_apart_joined,
)
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
PREFIXES = _gated_delta.PREFIXES
GGUF = GgufLayout(
    "qwen35moe",
    keys={**_gated_delta.GGUF_KEYS, **SHARED_GGUF_KEYS, **_sections.SECTIONS_KEY},
    implied_values=_gated_delta.implied_values_tiled,
)
tensors = partial(_gated_delta.tensors, names={**_gated_delta.NAMES, **EXPERTS, **SHARED})
take_apart = take_apart_joined


def configure(fields: Fields) -> ModelConfig:
    fields = _sections.text_part(fields)
    ffns = [experts_with_shared(fields, renormalize=True)] * fields.integer("num_hidden_layers")
    config = _gated_delta.configure(fields, "qwen3_5_moe", ffns, tiled=fields.flag("tiled", False))
    return _sections.with_sections(config, fields, (11, 11, 10))
