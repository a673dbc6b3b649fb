"""Qwen3.5, 3.6 and 3.8: gated delta rules, and attention with a gate in every fourth layer.

Of models for images it loads the text part.
"""

from __future__ import annotations

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _gated_delta
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import TensorTable

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
PREFIXES = _gated_delta.PREFIXES
GGUF = GgufLayout("qwen35", keys=_gated_delta.GGUF_KEYS, implied=_gated_delta.implied_tiled)


def configure(fields: Fields) -> ModelConfig:
    fields = fields.section("text_config") or fields
    return _gated_delta.configure(fields, "qwen3_5", tiled=fields.flag("tiled", False))


def tensors(config: ModelConfig) -> TensorTable:
    return _gated_delta.tensors(config, _gated_delta.NAMES)
