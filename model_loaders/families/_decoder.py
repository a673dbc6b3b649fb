"""What families have in common: keys of the decoder's configuration, names of its tensors, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from polarlm.model_loaders.config import (
    Activation,
    Attention,
    Ffn,
    GatedMLP,
    Layer,
    Mixer,
    ModelConfig,
    Norms,
    QKNorm,
    RopeConfig,
)
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names, TensorTable, tensor_table
from polarlm.model_loaders.rope import rope_config, rotary_dim

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
QK_NORMS: Names = {
    "q_norm": (("self_attn.q_norm", "attn_q_norm"),),
    "k_norm": (("self_attn.k_norm", "attn_k_norm"),),
}
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
MAX_SIZE = 2**24  # hidden, feed-forward and vocabulary sizes
_MAX_LAYERS = 4096
MAX_HEADS = 65536


def decoder(
    fields: Fields,
    family: str,
    *,
    activation_key: str = "hidden_act",
    activations: Mapping[str, Activation] = _ACTIVATIONS,
    rope: RopeConfig | None = None,
    partial_rope: bool = False,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QKNorm = None,
    norms: Norms = "before",
    scale: float | None = None,
    embedding_scale: Callable[[int], float] | None = None,
    windows: Sequence[int | None] = (),
    ropes: Sequence[RopeConfig | None] = (),
    ffns: Sequence[Ffn] = (),
    softcap: float | None = None,
    logit_softcap: float | None = None,
    output_gate: bool = False,
) -> ModelConfig:
    """The ModelConfig from the keys that all families share.

    activation_key, activations: the key of the activation and its supported values, the default first. rope: RoPE, if
    the family has read it already. partial_rope: whether RoPE may rotate a part of the channels alone. head_dim: the
    family's default; None: E / H. embedding_scale: computes the scale from the hidden size. windows, ropes, ffns: one
    per layer; empty: no windows, `rope` in all layers, and a gated network of `intermediate_size` in all layers.
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
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        rope,
        rotary_dim(fields, head_dim) if partial_rope else None,
        scale=scale,
        softcap=softcap,
        qk_norm=qk_norm,
        output_gate=output_gate,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )
    count = layer_count(fields)
    if not ffns:
        ffns = [gated_mlp(fields, activation_key, activations, bias=mlp_bias)] * count
    mixers = [
        replace(attention, window=window, rope=rope)
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


def layer_count(fields: Fields, key: str = "num_hidden_layers") -> int:
    return fields.integer(key, maximum=_MAX_LAYERS)


def with_mixer(config: ModelConfig, mixer: Mixer, has_it: Sequence[bool]) -> ModelConfig:
    """The configuration with `mixer` instead of attention in the layers that have it."""
    layers = (Layer(mixer, layer.ffn) if own else layer for layer, own in zip(config.layers, has_it, strict=True))
    return replace(config, layers=tuple(layers))


def check_kinds(fields: Fields, kinds: Sequence[str], known: Sequence[str], layers: int) -> None:
    """Raises LoadError unless `kinds`, which `layer_types` says, are one of `known` for each layer."""
    if len(kinds) != layers or not set(kinds) <= set(known):
        names = f"{', '.join(known[:-1])} or {known[-1]}"
        raise fields.refuse("layer_types", f"but must say {names} for {layers} layers")


def check_attention(fields: Fields, attends: Sequence[bool], key: str = "layer_types") -> None:
    """Raises LoadError unless some layer has attention. key: where the kinds of layers are."""
    if not any(attends):
        raise fields.refuse(key, "but a model without attention in any layer is not supported")


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer; empty for none.

    `sliding_window` counts only if `use_sliding_window` is true: in the layers that `layer_types` names, or else in the
    layers from `max_window_layers` on.
    """
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return ()
    layers, window = layer_count(fields), fields.integer("sliding_window")
    kinds = fields.texts("layer_types")
    if not kinds:
        first = fields.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return typed_windows(fields, kinds)


def typed_windows(fields: Fields, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer: `sliding_window` where `kinds` says sliding_attention."""
    layers, window = layer_count(fields), fields.integer("sliding_window")
    check_kinds(fields, kinds, ("sliding_attention", "full_attention"), layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
