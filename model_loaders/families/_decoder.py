"""What families have in common: keys of the decoder's configuration, names of its tensors, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polarlm.model_loaders.config import (
    Activation,
    Attention,
    Ffn,
    GatedMLP,
    Layer,
    Mixer,
    ModelConfig,
    Norms,
    RopeConfig,
)
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names, TensorTable, tensor_table
from polarlm.model_loaders.rope import rope_config, rotary_dim

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
QK_NORMS: Names = {"q_norm": (("self_attn.q_norm", "attn_q_norm"),), "k_norm": (("self_attn.k_norm", "attn_k_norm"),)}
PROJECTIONS: Names = {
    "qkv": (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v")),
    "out": (("self_attn.o_proj", "attn_output"),),
    "gate_up": (("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up")),
    "down": (("mlp.down_proj", "ffn_down"),),
}
PRE_NORMS: Names = {
    "attention_norm": (("input_layernorm", "attn_norm"),),
    "ffn_norm": (("post_attention_layernorm", "ffn_norm"),),
}
IMAGE_PREFIXES = {  # in files of models that read images
    **{f"{prefix}model.": "model." for prefix in ("language_model.", "model.language_")},
    "language_model.lm_head.": "lm_head.",
}
# Keys of configurations that say nothing of a model's arithmetic.
ABOUT_MODELS = (
    *("_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id"),
    *("dtype", "eos_token_id", "initializer_range", "layer_types", "max_window_layers", "model_type", "pad_token_id"),
    *("pretraining_tp", "return_dict", "torch_dtype", "transformers_version", "use_cache"),
)
MAX_SIZE = 2**24  # hidden, feed-forward and vocabulary sizes
_MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_DIM, MAX_WIDTH = 4096, 16  # recurrent heads have such dims, and convolutions such widths


def decoder(
    fields: Fields,
    family: str,
    *,
    activation_key: str = "hidden_act",
    activations: Mapping[str, Activation] = _ACTIVATIONS,
    rope: RopeConfig | None = None,
    partial_rope: bool = False,
    head_dim: int | None = None,
    bias: bool | None = False,
    mlp_bias: bool = False,
    norms: Norms = "before",
    embedding_scale: Callable[[int], float] | None = None,
    windows: Sequence[int | None] = (),
    ropes: Sequence[RopeConfig | None] = (),
    ffns: Sequence[Ffn] = (),
    logit_softcap: float | None = None,
    **attention: Any,
) -> ModelConfig:
    """The ModelConfig from the keys that all families share.

    activation_key, activations: the key of the activation and its supported values, the default first. rope: RoPE, if
    the family has read it already. partial_rope: whether RoPE may rotate a part of the channels alone. head_dim: the
    family's default; None: E / H. bias: whether q, k, v and out have biases; None: if `attention_bias` says so.
    embedding_scale: computes the scale from the hidden size. windows, ropes, ffns: one per layer; empty: no windows,
    `rope` in all layers, and a gated network of `intermediate_size` in all layers. attention: further fields of
    `Attention`.
    """
    hidden_size = fields.integer("hidden_size", maximum=MAX_SIZE)
    heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", heads, maximum=MAX_HEADS)
    if heads % kv_heads:
        raise fields.refuse("num_attention_heads", f"which is not a multiple of the {kv_heads} key/value heads")
    if head_dim is None and not fields.has("head_dim") and hidden_size % heads:
        raise fields.refuse("hidden_size", f"which {heads} attention heads do not divide, and no head_dim is given")
    head_dim = fields.integer("head_dim", head_dim or hidden_size // heads, maximum=MAX_SIZE)
    if head_dim % 2:
        key = "head_dim" if fields.has("head_dim") else "hidden_size"
        raise fields.refuse(key, f"but RoPE needs an even number of channels per head, not {head_dim}")
    max_context = fields.integer("max_position_embeddings")
    rope = rope or rope_config(fields, max_context, partial=partial_rope)
    if rope.kind == "yarn":  # some files give the trained context as the maximum, some the extended one
        max_context = max(max_context, int(rope.original_context * rope.factor))
    rotary_channels, has_bias = rotary_dim(fields, head_dim) if partial_rope else None, bias
    if has_bias is None:
        has_bias = fields.flag("attention_bias", False)
    settings = {"qkv_bias": has_bias, "out_bias": has_bias, **attention}
    count, plain = layer_count(fields), Attention(heads, kv_heads, head_dim, rope, rotary_channels, **settings)
    if not ffns:
        ffns = [gated_mlp(fields, activation_key, activations, bias=mlp_bias)] * count
    mixers = [
        replace(plain, window=window, rope=rope)
        for window, rope in zip(windows or [None] * count, ropes or [rope] * count, strict=True)
    ]
    return ModelConfig(
        family=family,
        layers=tuple(Layer(mixer, ffn, norms) for mixer, ffn in zip(mixers, ffns, strict=True)),
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size", maximum=MAX_SIZE),
        max_context=max_context,
        norm_eps=fields.positive("rms_norm_eps"),
        tied_head=fields.flag("tie_word_embeddings", False),
        embedding_scale=1.0 if embedding_scale is None else embedding_scale(hidden_size),
        rounded_scale=embedding_scale is not None,
        logit_softcap=logit_softcap,
    )


def gated_mlp(
    fields: Fields,
    activation_key: str = "hidden_act",
    activations: Mapping[str, Activation] = _ACTIVATIONS,
    *,
    size_key: str = "intermediate_size",
    bias: bool = False,
) -> GatedMLP:
    """The feed-forward network of a dense layer."""
    activation = fields.text(activation_key, next(iter(activations)))
    if activation not in activations:
        raise fields.refuse(activation_key, f"but only {next(iter(activations))} is supported")
    return GatedMLP(fields.integer(size_key, maximum=MAX_SIZE), activations[activation], bias)


def plain_tensors(config: ModelConfig) -> TensorTable:
    """The tensors of Llama, and of families with the same names."""
    return tensor_table(config, {**PRE_NORMS, **(QK_NORMS if config.attention.qk_norm else {}), **PROJECTIONS})


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def dense_first(fields: Fields, dense: int, expert_ffn: Ffn) -> Sequence[Ffn]:
    """The feed-forward network of each layer: experts after the first `dense` layers."""
    count = layer_count(fields)
    return [gated_mlp(fields)] * min(dense, count) + [expert_ffn] * max(0, count - dense)


def with_mixer(config: ModelConfig, mixer: Mixer, attends: Sequence[bool]) -> ModelConfig:
    """The configuration with `mixer` in the layers that have no attention."""
    layers = (layer if one else replace(layer, mixer=mixer) for layer, one in zip(config.layers, attends, strict=True))
    return replace(config, layers=tuple(layers))


def attending(
    fields: Fields, kinds: Sequence[str], others: Sequence[str], attention: Sequence[str] = ("full_attention",)
) -> list[bool]:
    """Which layers have attention. kinds: what `layer_types` says.

    Raises LoadError unless that is a kind of `others` or `attention` for each layer, and attention for some.
    """
    known_kinds, layers = [*others, *attention], layer_count(fields)
    if len(kinds) != layers or not set(kinds) <= set(known_kinds):
        names = f"{', '.join(known_kinds[:-1])} or {known_kinds[-1]}"
        raise fields.refuse("layer_types", f"but must say {names} for {layers} layers")
    if attention and not set(kinds) & set(attention):
        raise without_attention(fields, "layer_types")
    return [kind in attention for kind in kinds]


def without_attention(fields: Fields, key: str) -> LoadError:
    return fields.refuse(key, "but a model without attention in any layer is not supported")


def same_windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer: `sliding_window`, if there is one."""
    return (fields.integer("sliding_window"),) * layer_count(fields) if fields.has("sliding_window") else ()


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer; empty for none.

    `sliding_window` counts only if `use_sliding_window` is true: in the layers that `layer_types` names, or else in the
    layers from `max_window_layers` on.
    """
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return ()
    layers, window = layer_count(fields), fields.integer("sliding_window")
    if not fields.texts("layer_types"):
        first = fields.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return typed_windows(fields, ())


def typed_windows(fields: Fields, usual: Iterable[bool]) -> tuple[int | None, ...]:
    """The window of each layer: `sliding_window` where `layer_types` says sliding_attention. usual: which layers have
    one where the key is absent."""
    kinds = fields.texts("layer_types") or ["sliding_attention" if one else "full_attention" for one in usual]
    window = fields.integer("sliding_window")
    attending(fields, kinds, ("sliding_attention", "full_attention"), ())
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def typed_ropes(fields: Fields, theta: float, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of layers without and with a window, from `rope_parameters`, or from `rope_theta` and
    `rope_local_base_freq`. theta, local_theta: where the keys are absent."""
    context, by_type = fields.integer("max_position_embeddings"), fields.section("rope_parameters")
    local_theta = fields.number("rope_local_base_freq", local_theta, minimum=2.0)
    if by_type is None or not by_type.sections():
        return rope_config(fields, context, theta=theta), RopeConfig(theta=local_theta)
    full, local = (
        by_type.section(kind) or Fields({}, by_type.where) for kind in ("full_attention", "sliding_attention")
    )
    return (
        rope_config(fields, context, section=full, theta=theta),
        rope_config(Fields({"rope_theta": local_theta}, fields.where), context, section=local),
    )
