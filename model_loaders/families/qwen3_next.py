"""Qwen3-Next and Qwen3-Coder-Next: gated delta rules, attention with a gate in every fourth layer, and experts."""

from __future__ import annotations

from dataclasses import replace

from polarlm.model_loaders.config import GatedDelta, ModelConfig
from polarlm.model_loaders.families import _gated_delta
from polarlm.model_loaders.families._experts import EXPERTS, SHARED, SHARED_GGUF_KEYS, experts_with_shared, qwen_layers
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorTable

ARCHITECTURES = ("Qwen3NextForCausalLM",)
PREFIXES = _gated_delta.PREFIXES
_HALVES = ("linear_attn.in_proj_ba", "ssm_ba")
_NAMES = {
    **_gated_delta.NAMES,
    "delta_in": (*_gated_delta.NAMES["delta_in"][:2], _HALVES, _HALVES),
    **EXPERTS,
    **SHARED,
}
GGUF = GgufLayout(
    "qwen3next", keys={**_gated_delta.GGUF_KEYS, **SHARED_GGUF_KEYS}, implied_values=_gated_delta.implied_values
)


def configure(fields: Fields) -> ModelConfig:
    expert_ffn = experts_with_shared(fields, renormalize=fields.flag("norm_topk_prob", True))
    return _gated_delta.configure(fields, "qwen3_next", qwen_layers(fields, expert_ffn))


def tensors(config: ModelConfig) -> TensorTable:
    """The projections of a delta rule are in two tensors, which have the rows of one key head after the other."""
    table = _gated_delta.tensors(config, _NAMES)
    layers = (
        _split(slots, layer.mixer) if isinstance(layer.mixer, GatedDelta) else slots
        for layer, slots in zip(config.layers, table.layers, strict=True)
    )
    return replace(table, layers=tuple(layers))


def _split(slots: Slots, mixer: GatedDelta) -> Slots:
    shared = mixer.value_heads // mixer.key_heads
    sizes = mixer.key_dim, mixer.key_dim, shared * mixer.value_dim, shared * mixer.value_dim
    qkv, z, b, a = slots["delta_in"]
    whole = qkv.name.replace("in_proj_qkv.", "in_proj_qkvz.")
    parts = (
        qkv.as_parts(sizes, 0, 1, 2, source=whole),
        z.as_parts(sizes, 3, source=whole),
        b.as_parts((shared, shared), 0),
        a.as_parts((shared, shared), 1),
    )
    return {**slots, "delta_in": parts}
