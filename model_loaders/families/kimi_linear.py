"""Kimi Linear: delta rules that decay by channel, latent attention without RoPE, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import ChannelDelta, ModelConfig
from polarlm.model_loaders.families import _latent
from polarlm.model_loaders.families._decoder import MAX_DIM, MAX_HEADS, MAX_WIDTH, with_mixer, without_attention
from polarlm.model_loaders.families._experts import SHARED_BESIDE
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.families.mixtral import EXPERTS
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("KimiLinearForCausalLM",)
_KEYS = {  # of other families → of files
    **{"num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts"},
    **{"norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group"},
    "max_position_embeddings": "model_max_length",
}
_IN = {**{f"{one}_proj": f"attn_{one}" for one in "qkv"}, "b_proj": "ssm_beta"}
_DELTA = {
    **{"delta_in": _IN, "delta_decay_down": {"f_a_proj": "ssm_f_a"}, "delta_gate_down": {"g_a_proj": "ssm_g_a"}},
    "delta_conv": {f"{one}_conv1d": f"ssm_conv1d_{one}" for one in "qkv"},
    **{"delta_decay": {"A_log": "ssm_a"}, "delta_dt_bias": {"dt_bias": "ssm_dt.bias"}},
    **{"delta_decay_up": {"f_b_proj": "ssm_f_b"}, "delta_gate_up": {"g_b_proj": "ssm_g_b"}},
    **{"delta_out_norm": {"o_norm": "ssm_norm"}, "delta_out": {"o_proj": "attn_output"}},
}
_NAMES = {
    **{slot: tuple((f"self_attn.{one}", ggml) for one, ggml in names.items()) for slot, names in _DELTA.items()},
    "delta_norm": (("input_layernorm", "attn_norm"),),
    **EXPERTS,
    **{
        slot: tuple((theirs.replace("mlp.", "block_sparse_moe."), ggml) for theirs, ggml in names)
        for slot, names in SHARED_BESIDE.items()
    },
}
tensors = partial(_latent.latent_tensors, more=_NAMES)


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """GGUF files list KV heads, 0 where a layer has a delta rule, which has as many heads as attention."""
    kv_heads = values["num_key_value_heads"]
    full = [number for number, heads in enumerate(kv_heads, 1) if heads] if isinstance(kv_heads, list) else []
    delta = {"full_attn_layers": full, "num_heads": values["num_attention_heads"]}
    delta |= {"head_dim": values["delta_dim"], "short_conv_kernel_size": values["delta_width"]}
    return {**_latent.GGUF.implied_values(values), "linear_attn_config": delta}


_GGUF_KEYS = {**_latent.GGUF.keys, "delta_dim": "kda.head_dim", "delta_width": "ssm.conv_kernel"}
GGUF = GgufLayout("kimi-linear", keys=_GGUF_KEYS, implied_values=_implied_values)


def configure(fields: Fields) -> ModelConfig:
    for key, value in (("mla_use_nope", True), ("moe_layer_freq", 1), ("moe_router_activation_func", "sigmoid")):
        fields.require(key, value)
    fields = fields.with_file_keys(_KEYS).with_defaults({"first_k_dense_replace": 1, "norm_topk_prob": True})
    fields = fields.with_values({"rope_parameters": None, "rope_scaling": None})  # not used
    config = _latent.latent_decoder(fields, "kimi_linear", scoring="sigmoid", choice_bias=True)
    delta = fields.section("linear_attn_config") or Fields({}, fields.where)
    heads, dim = delta.integer("num_heads", 32, maximum=MAX_HEADS), delta.integer("head_dim", 128, maximum=MAX_DIM)
    width = delta.integer("short_conv_kernel_size", 4, minimum=2, maximum=MAX_WIDTH)
    attends = [number in delta.integers("full_attn_layers") for number in range(1, config.depth + 1)]
    if not any(attends):
        raise without_attention(delta, "full_attn_layers")
    config = config.with_attention(lambda one: replace(one, rope=None))
    return with_mixer(config, ChannelDelta(heads, heads, dim, dim, width, rank=dim), attends)
