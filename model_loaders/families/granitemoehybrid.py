"""Granite 4 H, and Granite 3 with experts: Mamba 2 in most layers and attention in the others, or attention in all.

Networks are dense, or experts with a shared network or without. Next to Mamba 2, attention has no RoPE in most models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import Ffn, ModelConfig
from polarlm.model_loaders.families import _granite
from polarlm.model_loaders.families._decoder import PROJECTIONS, attending, gated_mlp, layer_count, with_mixer
from polarlm.model_loaders.families._experts import GGUF_KEYS, experts
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.families._mamba2 import GGUF_KEYS as MAMBA_KEYS
from polarlm.model_loaders.families._mamba2 import implied_values, mamba2, names
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.joined_experts import DOWN, GATE, UP, split_layers
from polarlm.model_loaders.files.tensor_table import TensorSpec, TensorTable, tensor_table

MODEL_TYPES = ("granitemoehybrid", "granitemoe", "granitemoeshared")
ARCHITECTURES = ("GraniteMoeHybridForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")  # in older and in newer files
_NORM = ("input_layernorm", "attn_norm")
_HALVES = "shared_mlp.input_linear"  # gate and up in one tensor
_SHARED = (_HALVES, "ffn_gate"), (_HALVES, "ffn_up")
_NAMES = {
    "attention_norm": (_NORM,),
    **names("mamba.", _NORM),
    "qkv": PROJECTIONS["qkv"],
    "out": PROJECTIONS["out"],
    "ffn_norm": (("post_attention_layernorm", "ffn_norm"),),
    "gate_up": _SHARED,
    "down": (("shared_mlp.output_linear", "ffn_down"),),
    "router": (("block_sparse_moe.router.layer", "ffn_gate_inp"),),
    "experts_gate_up": (
        ("block_sparse_moe.experts.{}.gate_proj", "ffn_gate_exps"),
        ("block_sparse_moe.experts.{}.up_proj", "ffn_up_exps"),
    ),
    "experts_down": (("block_sparse_moe.experts.{}.down_proj", "ffn_down_exps"),),
    "shared_gate_up": tuple((theirs, f"{ggml}_shexp") for theirs, ggml in _SHARED),
    "shared_down": (("shared_mlp.output_linear", "ffn_down_shexp"),),
}
take_apart = partial(  # files have the up projection of an expert after its gate
    split_layers,
    prefix="block_sparse_moe.",
    gate_up=("input_linear.weight", (GATE, UP)),
    down=("output_linear.weight", (DOWN,)),
    experts="experts.",
)


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """GGUF files have the size of a dense model's network under the key of an expert's."""
    kv_heads, layers = values["num_key_value_heads"], values["num_hidden_layers"]
    values_implied = implied_values(values)
    if isinstance(kv_heads, list):
        values_implied["layer_types"] = [_ATTENTION[0] if one else _MAMBA[0] for one in kv_heads]
    elif isinstance(layers, int):
        values_implied["layer_types"] = [_ATTENTION[0]] * min(layers, 4096)
    if not values["num_local_experts"]:
        values_implied |= {"num_local_experts": 0, "shared_intermediate_size": values["intermediate_size"]}
    return values_implied | _granite.implied_values(values)


GGUF = GgufLayout(
    "granitehybrid",
    other_architectures=("granitemoe",),
    interleaved=True,
    keys={
        **MAMBA_KEYS,
        **_granite.GGUF_KEYS,
        "num_local_experts": GGUF_KEYS["num_experts"],
        "num_experts_per_tok": GGUF_KEYS["num_experts_per_tok"],
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    implied_values=_implied_values,
)


def configure(fields: Fields) -> ModelConfig:
    count = layer_count(fields)
    if fields.text("model_type") != "granitemoehybrid":
        kinds = [_ATTENTION[0]] * count
        fields = fields.with_values({"layer_types": kinds, "position_embedding_type": "rope"})
    attends = attending(fields, fields.texts("layer_types") or [_MAMBA[0]] * count, _MAMBA, _ATTENTION)
    config = _granite.granite(fields, "granitemoehybrid", ffns=[_network(fields)] * count)
    if all(attends):
        return config
    return with_mixer(config, mamba2(_with_head_dim(fields), fields.positive("rms_norm_eps")), attends)


def _with_head_dim(fields: Fields) -> Fields:
    """The fields with a head dim where they say "auto", or nothing."""
    if fields.has("mamba_d_head") and not isinstance(fields.value("mamba_d_head"), str):
        return fields
    inner, heads = fields.integer("mamba_expand", 2) * fields.integer("hidden_size"), fields.integer("mamba_n_heads")
    if inner % heads:
        raise fields.refuse("mamba_n_heads", f"which does not divide the {inner} channels of Mamba 2")
    return fields.with_values({"mamba_d_head": inner // heads})


def _network(fields: Fields) -> Ffn:
    has_shared = fields.integer("shared_intermediate_size", 0, minimum=0) > 0
    shared = gated_mlp(fields, size_key="shared_intermediate_size") if has_shared else None
    if fields.integer("num_local_experts", 0, minimum=0) > 0:
        return experts(fields, size_key="intermediate_size", renormalize=True, shared=shared)
    return shared or gated_mlp(fields, size_key="shared_intermediate_size")


def tensors(config: ModelConfig) -> TensorTable:
    """Safetensors have gate and up of the shared network in one tensor."""
    table = tensor_table(config, _NAMES)
    layers = ({slot: _halves(slot, specs) for slot, specs in slots.items()} for slots in table.layers)
    return replace(table, layers=tuple(layers))


def _halves(slot: str, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    if slot not in ("gate_up", "shared_gate_up"):
        return specs
    sizes = tuple(spec.shape[0] for spec in specs)
    return tuple(spec.as_parts(sizes, half) for half, spec in enumerate(specs))
