"""LFM2 and LFM2-VL: short convolutions in most layers, attention in the others; each head of q and k is normalized."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from polarlm.model_loaders.config import GatedMLP, ModelConfig, ShortConv
from polarlm.model_loaders.families._decoder import (
    IMAGE_PREFIXES,
    MAX_SIZE,
    PROJECTIONS,
    attending,
    decoder,
    layer_count,
    with_mixer,
)
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

MODEL_TYPES = ("lfm2", "lfm2_vl")
ARCHITECTURES = ("Lfm2ForCausalLM", "Lfm2VlForConditionalGeneration")
PREFIXES = IMAGE_PREFIXES
_CONV, _ATTENTION = "conv", "full_attention"
_NORM = ("operator_norm", "attn_norm")
NAMES = {
    "attention_norm": (_NORM,),
    "q_norm": (("self_attn.q_layernorm", "attn_q_norm"),),
    "k_norm": (("self_attn.k_layernorm", "attn_k_norm"),),
    "qkv": PROJECTIONS["qkv"],
    "out": (("self_attn.out_proj", "attn_output"),),
    "conv_norm": (_NORM,),
    "conv_in": (("conv.in_proj", "shortconv.in_proj"),),
    "conv": (("conv.conv", "shortconv.conv"),),
    "conv_out": (("conv.out_proj", "shortconv.out_proj"),),
    "ffn_norm": (("ffn_norm", "ffn_norm"),),
    "gate_up": (("feed_forward.w1", "ffn_gate"), ("feed_forward.w3", "ffn_up")),
    "down": (("feed_forward.w2", "ffn_down"),),
}
LAST_NORM = ("model.embedding_norm", "token_embd_norm")


def implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """GGUF files list the KV heads of each layer, 0 for a convolution, and have the final size of the networks."""
    heads = values["num_key_value_heads"]
    values_implied: dict[str, object] = {"block_auto_adjust_ff_dim": False}
    if isinstance(heads, list) and all(type(one) is int for one in heads):
        values_implied["num_key_value_heads"] = max(heads, default=0)
        values_implied["layer_types"] = [_ATTENTION if one else _CONV for one in heads]
    return values_implied


GGUF = GgufLayout("lfm2", keys={"conv_L_cache": "shortconv.l_cache"}, implied_values=implied_values)
tensors = partial(tensor_table, names=NAMES, last_norm=LAST_NORM)


def configure(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields.section("text_config") or fields)
    fields.require("model_type", "lfm2")
    ffns = [_network(fields)] * layer_count(fields)
    return with_convolutions(fields, decoder(fields, "lfm2", qk_norm="head", ffns=ffns))


def with_defaults(fields: Fields) -> Fields:
    """The fields under the names and with the defaults of other families."""
    return fields.with_defaults({"rms_norm_eps": fields.positive("norm_eps", 1e-5), "rope_theta": 1_000_000.0})


def with_convolutions(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The configuration with a convolution instead of attention in the layers that have one."""
    count = len(config.layers)
    kinds = fields.texts("layer_types")
    if not kinds:
        indices = set(fields.integers("full_attn_idxs")) if fields.has("full_attn_idxs") else set(range(count))
        kinds = [_ATTENTION if layer in indices else _CONV for layer in range(count)]
    return with_mixer(config, short_conv(fields), attending(fields, kinds, [_CONV]))


def short_conv(fields: Fields) -> ShortConv:
    """The convolution of the layers that have one."""
    width = fields.integer("conv_L_cache", 3, minimum=2, maximum=16)
    return ShortConv(fields.integer("hidden_size", maximum=MAX_SIZE), width, fields.flag("conv_bias", False))


def _network(fields: Fields) -> GatedMLP:
    """The feed-forward network, whose size most configurations give before it is adjusted."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
    if fields.flag("block_auto_adjust_ff_dim", True):
        unit = fields.integer("block_multiple_of", 256)
        size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // unit) * unit
    return GatedMLP(size)
