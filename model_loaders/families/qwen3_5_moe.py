"""Qwen3.5, 3.6 and 3.8 with a mixture of experts and a shared one with a gate: 35B-A3B, 122B-A10B.

RoPE has sections, which take turns.
"""

from __future__ import annotations

from collections.abc import Mapping

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _gated_delta, _qwen
from polarlm.model_loaders.families._experts import EXPERTS, SHARED, SHARED_GGUF_KEYS, experts_with_shared
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.joined_experts import DOWN, GATE, UP, split_layers
from polarlm.model_loaders.files.tensor_table import TensorTable
from polarlm.model_loaders.files.tensors import StoredTensor

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
PREFIXES = _gated_delta.PREFIXES
GGUF = GgufLayout(
    "qwen35moe",
    keys={**_gated_delta.GGUF_KEYS, **SHARED_GGUF_KEYS, **_qwen.SECTIONS_KEY},
    implied=_gated_delta.implied_tiled,
)


def configure(fields: Fields) -> ModelConfig:
    fields = _qwen.text_part(fields)
    ffns = [experts_with_shared(fields, renormalize=True)] * fields.integer("num_hidden_layers")
    config = _gated_delta.configure(fields, "qwen3_5_moe", ffns, tiled=fields.flag("tiled", False))
    return _qwen.with_sections(config, fields, (11, 11, 10))


def tensors(config: ModelConfig) -> TensorTable:
    return _gated_delta.tensors(config, {**_gated_delta.NAMES, **EXPERTS, **SHARED})


def take_apart(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Files have the matrices of all experts in two tensors, and the up projection of an expert after its gate."""
    return split_layers(config, stored, "mlp.experts.", ("gate_up_proj", (GATE, UP)), (DOWN, (DOWN,)))
