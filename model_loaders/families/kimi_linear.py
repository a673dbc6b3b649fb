"""Kimi Linear: delta rules that decay by channel, latent attention without RoPE, and experts; on the CPU alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import ChannelDelta, ModelConfig
from polarlm.model_loaders.families import _latent
from polarlm.model_loaders.families._decoder import MAX_DIM, MAX_HEADS, MAX_WIDTH, attending, layer_count, with_mixer
from polarlm.model_loaders.families._experts import SHARED_BESIDE
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.families.mixtral import EXPERTS
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("KimiLinearForCausalLM",)
_DELTA, _ATTENTION, _WITHOUT_ROPE = "linear_attention", "full_attention", ("rope_parameters", "rope_scaling")
_KEYS = {  # of other families → of files
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "max_position_embeddings": "model_max_length",
}
_DELTA_KEYS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_IN = {
    **{f"{one}_proj": f"attn_{one}" for one in "qkv"},
    "b_proj": "ssm_beta",
    "f_a_proj": "ssm_f_a",
    "g_a_proj": "ssm_g_a",
}
_NAMES = {
    **EXPERTS,
    **{
        slot: tuple((theirs.replace("mlp.", "block_sparse_moe."), ggml) for theirs, ggml in names)
        for slot, names in SHARED_BESIDE.items()
    },
    "delta_norm": (("input_layernorm", "attn_norm"),),
    "delta_in": tuple((f"self_attn.{theirs}", ggml) for theirs, ggml in _IN.items()),
    "delta_conv": tuple((f"self_attn.{one}_conv1d", f"ssm_conv1d_{one}") for one in "qkv"),
    "delta_decay": (("self_attn.A_log", "ssm_a"),),
    "delta_dt_bias": (("self_attn.dt_bias", "ssm_dt.bias"),),
    "delta_decay_up": (("self_attn.f_b_proj", "ssm_f_b"),),
    "delta_gate_up": (("self_attn.g_b_proj", "ssm_g_b"),),
    "delta_out_norm": (("self_attn.o_norm", "ssm_norm"),),
    "delta_out": (("self_attn.o_proj", "attn_output"),),
}
tensors = partial(_latent.latent_tensors, more=_NAMES)


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """GGUF files list KV heads, 0 where a layer has a delta rule, which has as many heads as attention."""
    kv_heads, implied = values["num_key_value_heads"], {**_latent.GGUF.implied_values(values)}
    if isinstance(kv_heads, list):
        implied["layer_types"] = [_ATTENTION if heads else _DELTA for heads in kv_heads]
    return {**implied, "linear_num_heads": values["num_attention_heads"]}


GGUF = GgufLayout(
    "kimi-linear",
    keys={**_latent.GGUF.keys, "linear_head_dim": "kda.head_dim", "linear_conv_kernel_dim": "ssm.conv_kernel"},
    implied_values=_implied_values,
)


def configure(fields: Fields) -> ModelConfig:
    for key, value in (("mla_use_nope", True), ("moe_layer_freq", 1), ("moe_router_activation_func", "sigmoid")):
        fields.require(key, value)
    fields = fields.with_file_keys(_KEYS).with_values(dict.fromkeys(_WITHOUT_ROPE))
    fields = fields.with_defaults({"first_k_dense_replace": 1, "norm_topk_prob": True})
    config = _latent.latent_decoder(fields, "kimi_linear", scoring="sigmoid", choice_bias=True)
    config = config.with_attention(lambda one: replace(one, rope=None))
    delta = fields.section("linear_attn_config") or Fields({}, fields.where)
    full = delta.integers("full_attn_layers")  # counted from 1
    kinds = fields.texts("layer_types") or [
        _ATTENTION if layer + 1 in full else _DELTA for layer in range(layer_count(fields))
    ]
    return with_mixer(config, _delta(delta.with_file_keys(_DELTA_KEYS), fields), attending(fields, kinds, [_DELTA]))


def _delta(delta: Fields, fields: Fields) -> ChannelDelta:
    """delta: the section of a configuration; some files have its keys beside others."""
    delta = delta.with_defaults({key: fields.value(key) for key in _DELTA_KEYS})
    heads, dim = (
        delta.integer("linear_num_heads", 32, maximum=MAX_HEADS),
        delta.integer("linear_head_dim", 128, maximum=MAX_DIM),
    )
    width = delta.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_WIDTH)
    return ChannelDelta(heads, heads, dim, dim, width, rank=dim)
