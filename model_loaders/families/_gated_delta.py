"""What families have in common whose layers have a gated delta rule, or every few layers attention with a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polarlm.model_loaders.config import Attention, Ffn, GatedDelta, ModelConfig
from polarlm.model_loaders.families._decoder import (
    MAX_DIM,
    MAX_HEADS,
    MAX_WIDTH,
    PROJECTIONS,
    QK_NORMS,
    attending,
    decoder,
    layer_count,
    with_mixer,
)
from polarlm.model_loaders.families._gguf import without_last
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names, TensorTable, tensor_table

_DELTA, _ATTENTION = "linear_attention", "full_attention"
GGUF_KEYS = {  # for `GgufLayout`
    "full_attention_interval": "full_attention_interval",
    "rotary_dim": "rope.dimension_count",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_inner_size": "ssm.inner_size",
    "layers_after_last": "nextn_predict_layers",
}
_NORM = ("input_layernorm", "attn_norm")
NAMES: Names = {
    "attention_norm": (_NORM,),
    **QK_NORMS,
    **PROJECTIONS,
    "output_gate": (("self_attn.q_proj", "attn_q"),),
    "ffn_norm": (("post_attention_layernorm", "post_attention_norm"),),
    "delta_norm": (_NORM,),
    "delta_in": (
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
    ),
    "delta_conv": (("linear_attn.conv1d", "ssm_conv1d"),),
    "delta_decay": (("linear_attn.A_log", "ssm_a"),),
    "delta_dt_bias": (("linear_attn.dt_bias", "ssm_dt.bias"),),
    "delta_out_norm": (("linear_attn.norm", "ssm_norm"),),
    "delta_out": (("linear_attn.out_proj", "ssm_out"),),
    "mtp_embedding_norm": (("pre_fc_norm_embedding", "nextn.enorm"),),
    "mtp_hidden_norm": (("pre_fc_norm_hidden", "nextn.hnorm"),),
    "mtp_in": (("fc", "nextn.eh_proj"),),
    "mtp_norm": (("norm", "nextn.shared_head_norm"),),
}
PREFIXES = {  # for families
    "model.language_model.": "model.",
    **dict.fromkeys(("mtp.layers.0.", "mtp."), "model.layers.{depth}."),
}


def implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """What GGUF files say in other words."""
    inner, heads = values["linear_inner_size"], values["linear_num_value_heads"]
    values_implied = without_last(values)
    if isinstance(inner, int) and isinstance(heads, int) and heads:
        values_implied["linear_value_head_dim"] = inner // heads
    return values_implied


def implied_values_tiled(values: Mapping[str, object]) -> Mapping[str, object]:
    """As `implied_values`, of files in which value heads that share a key are far apart."""
    return {**implied_values(values), "tiled": True}


def configure(fields: Fields, family: str, ffns: Sequence[Ffn] = (), *, tiled: bool = False) -> ModelConfig:
    """The configuration of a hybrid. tiled: see `GatedDelta`."""
    fields = fields.with_defaults({"partial_rotary_factor": 0.25, "rope_theta": 10_000_000.0, "rms_norm_eps": 1e-6})
    config = decoder(fields, family, partial_rope=True, bias=None, qk_norm="head", output_gate=True, ffns=ffns)
    count, every = layer_count(fields), fields.integer("full_attention_interval", 4)
    kinds = fields.texts("layer_types") or [_DELTA if (layer + 1) % every else _ATTENTION for layer in range(count)]
    return with_mixer(config, _delta(fields, tiled), attending(fields, kinds, [_DELTA]))


def _delta(fields: Fields, tiled: bool) -> GatedDelta:
    keys = fields.integer("linear_num_key_heads", 16, maximum=MAX_HEADS)
    values = fields.integer("linear_num_value_heads", 32, maximum=MAX_HEADS)
    if values % keys:
        raise fields.refuse("linear_num_value_heads", f"which is not a multiple of the {keys} key heads")
    return GatedDelta(
        keys,
        values,
        fields.integer("linear_key_head_dim", 128, maximum=MAX_DIM),
        fields.integer("linear_value_head_dim", 128, maximum=MAX_DIM),
        fields.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_WIDTH),
        tiled and values > keys,
    )


def tensors(config: ModelConfig, names: Names) -> TensorTable:
    """The tensors of a hybrid. The rows of a head's gate follow the rows of its queries."""
    table, layers = tensor_table(config, names, norm_offset=1.0), []
    for layer, slots in zip(config.layers, table.layers, strict=True):
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            sizes = mixer.head_dim, mixer.head_dim
            queries, *others = slots["qkv"]
            slots = {**slots, "qkv": (queries.as_parts(sizes, 0), *others)}
            slots["output_gate"] = (slots["output_gate"][0].as_parts(sizes, 1),)
        layers.append(slots)
    return replace(table, layers=tuple(layers))
