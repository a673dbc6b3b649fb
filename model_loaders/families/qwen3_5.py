"""Qwen3.5, 3.6 and 3.8: gated delta rules, and attention with a gate in every fourth layer.

RoPE has sections, which take turns.
"""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _gated_delta, _sections
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
PREFIXES = _gated_delta.PREFIXES
GGUF = GgufLayout(
    "qwen35",
    keys={**_gated_delta.GGUF_KEYS, **_sections.SECTIONS_KEY},
    implied_values=_gated_delta.implied_values_tiled,
)
tensors = partial(_gated_delta.tensors, names=_gated_delta.NAMES)


def configure(fields: Fields) -> ModelConfig:
    fields = _sections.text_part(fields)
    config = _gated_delta.configure(fields, "qwen3_5", tiled=fields.flag("tiled", False))
    return _sections.with_sections(config, fields, (11, 11, 10))
