"""LFM3: LFM2 with longer convolutions, windows in half of the attention, a gate of each head, and norms of results."""

from __future__ import annotations

from polarlm.model_loaders.config import ModelConfig, RopeConfig
from polarlm.model_loaders.families._decoder import (
    MAX_SIZE,
    PROJECTIONS,
    QK_NORMS,
    attending,
    decoder,
    gated_mlp,
    layer_count,
    with_mixer,
)
from polarlm.model_loaders.families.lfm2 import LAST_NORM, NAMES, short_conv
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import TensorTable, tensor_table
from polarlm.model_loaders.rope import proportional

ARCHITECTURES = ("Lfm3ForCausalLM",)  # llama.cpp has no name for them
_HEAD_DIM, _THETA = 128, 1_000_000.0
_CONV, _FULL, _LOCAL = "conv", "full_attention", "sliding_attention"
_NAMES = {**NAMES, **QK_NORMS, "out": PROJECTIONS["out"], "output_gate": (("self_attn.gate_proj", "attn_gate"),)}
_POST_NORMS = {
    **dict.fromkeys(("attention_post_norm", "conv_post_norm"), (("post_operator_norm", "post_attention_norm"),)),
    "ffn_post_norm": (("post_ffn_norm", "post_ffw_norm"),),
}
_DEFAULTS = {  # values of the 1.7B model, which configurations may omit
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
    "conv_L_cache": 7,
    "sliding_window": 256,
}
_ROPES: dict[str, dict[str, object]] = {
    _FULL: {"rope_type": "proportional", "rope_theta": _THETA, "partial_rotary_factor": 0.5},
    _LOCAL: {"rope_theta": 10_000.0},
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_file_keys({"rms_norm_eps": "norm_eps"}).with_defaults(_DEFAULTS)
    kinds = fields.texts("layer_types") or [_default_kind(layer) for layer in range(layer_count(fields))]
    attends, window = attending(fields, kinds, [_CONV], (_FULL, _LOCAL)), fields.integer("sliding_window")
    ropes = {kind: _rope(fields, kind) for kind in (_FULL, _LOCAL)}
    config = decoder(
        fields,
        "lfm3",
        head_dim=_HEAD_DIM,
        rope=ropes[_FULL],
        bias=None,
        norms="both" if fields.flag("use_sandwich_norm", True) else "before",
        windows=[window if kind == _LOCAL else None for kind in kinds],
        ropes=[ropes.get(kind) for kind in kinds],
        ffns=[gated_mlp(fields)] * len(kinds),
        qk_norm="head",
        output_gate=fields.flag("use_attention_gate", True),
        gate_by_head=True,
    )
    return with_mixer(config, short_conv(fields), attends)


def _default_kind(layer: int) -> str:
    return _FULL if layer % 4 == 2 else _LOCAL if layer % 4 == 0 and layer else _CONV


def _rope(fields: Fields, kind: str) -> RopeConfig:
    by_kind, context = fields.section("rope_parameters"), fields.integer("max_position_embeddings")
    section = (by_kind and by_kind.section(kind)) or Fields(_ROPES[kind], fields.where)
    head_dim = fields.integer("head_dim", _HEAD_DIM, maximum=MAX_SIZE)
    return proportional(fields, context, section, head_dim, theta=_THETA)


def tensors(config: ModelConfig) -> TensorTable:
    post_norms = _POST_NORMS if config.layers[0].norms == "both" else {}
    return tensor_table(config, {**_NAMES, **post_norms}, last_norm=LAST_NORM)
