"""Gemma 4: Gemma 3's norms and windows, with wider heads in layers without a window, and normed values.

E2B and E4B have an embedding for each layer, and their last layers share the K/V of earlier layers.
26B-A4B has experts beside the network of each layer; there and in 31B, the rows of an image see each other in layers
with a window. Sound is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import Attention, Experts, Ffn, GatedMLP, Layer, ModelConfig, RopeConfig
from polarlm.model_loaders.families._decoder import (
    IMAGE_PREFIXES,
    MAX_HEADS,
    MAX_SIZE,
    PROJECTIONS,
    QK_NORMS,
    layer_count,
    typed_windows,
)
from polarlm.model_loaders.families._experts import GGUF_KEYS, experts
from polarlm.model_loaders.families._gemma import (
    DEFAULTS,
    LOCAL_THETA,
    NORMS,
    PATTERN,
    THETA,
    gemma,
)
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.joined_experts import DOWN, split_layers
from polarlm.model_loaders.files.tensor_table import Names, TensorSpec, TensorTable, tensor_table
from polarlm.model_loaders.rope import proportional

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
ARCHITECTURES = tuple(
    f"Gemma4{kind}For{task}" for kind in ("", "Unified") for task in ("CausalLM", "ConditionalGeneration")
)
PREFIXES = IMAGE_PREFIXES
take_apart = partial(split_layers, prefix="experts.", gate_up=("gate_up_proj", ("gate_up_proj",)), down=(DOWN, (DOWN,)))
_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
_EMBEDDING: Names = {
    "layer_gate": (("per_layer_input_gate", "inp_gate"),),
    "layer_out": (("per_layer_projection", "proj"),),
    "layer_post_norm": (("post_per_layer_input_norm", "post_norm"),),
}
_FULL, _LOCAL = "full_attention", "sliding_attention"
_EXPERTS: Names = {
    "router": (("router.proj", "ffn_gate_inp"),),
    "router_norm": (("router.scale", "ffn_gate_inp.scale"),),
    "expert_factors": (("router.per_expert_scale", "ffn_down_exps.scale"),),
    "experts_norm": (("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),),
    "experts_gate_up": (("experts.{}.gate_up_proj", "ffn_gate_up_exps"),),
    "experts_down": (("experts.{}.down_proj", "ffn_down_exps"),),
    "experts_post_norm": (("post_feedforward_layernorm_2", "post_ffw_norm_2"),),
    "shared_gate_up": PROJECTIONS["gate_up"],
    "shared_down": PROJECTIONS["down"],
    "shared_post_norm": (("post_feedforward_layernorm_1", "post_ffw_norm_1"),),
}


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """What GGUF files say of layers without a window under the plain keys, and of others as lists or in own keys."""
    windows, kv_heads = values["layer_types"], values["num_key_value_heads"]
    thetas = {_FULL: values["rope_theta"] or THETA, _LOCAL: values["local_theta"] or LOCAL_THETA}
    implied_values: dict[str, object] = {
        "head_dim": values["local_head_dim"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        "hidden_size_per_layer_input": values["hidden_size_per_layer_input"] or 0,
        # GGUF files do not say it. Models with inputs of layers are the small ones, whose images are read like text.
        "use_bidirectional_attention": None if values["hidden_size_per_layer_input"] else "vision",
        "enable_moe_block": bool(values["num_experts"]),
        **_widths(values["intermediate_size"]),
    }
    if isinstance(windows, list):
        kinds = [_LOCAL if window else _FULL for window in windows]
        implied_values["layer_types"] = kinds
        kv_heads_by_kind: dict[str, object] = {}
        if isinstance(kv_heads, list) and len(kv_heads) == len(kinds):
            kv_heads_by_kind = dict(zip(kinds, kv_heads, strict=True))
            implied_values["num_key_value_heads"] = kv_heads = kv_heads_by_kind.get(_LOCAL, kv_heads_by_kind.get(_FULL))
        full_attention = {"head_dim": values["head_dim"], "num_key_value_heads": kv_heads_by_kind.get(_FULL, kv_heads)}
        implied_values["per_layer_config"] = {str(i): full_attention for i, kind in enumerate(kinds) if kind == _FULL}
    return implied_values


def _widths(sizes: object) -> Mapping[str, object]:
    """The size of networks in a list of sizes, and whether networks of some layers are twice as wide."""
    if not isinstance(sizes, list) or not sizes:
        return {}
    return {"intermediate_size": min(sizes), "use_double_wide_mlp": max(sizes) == 2 * min(sizes)}


GGUF = GgufLayout(
    "gemma4",
    keys={
        "sliding_window": "attention.sliding_window",
        "layer_types": "attention.sliding_window_pattern",
        "local_head_dim": "attention.key_length_swa",
        "local_theta": "rope.freq_base_swa",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        **GGUF_KEYS,
    },
    implied_values=_implied_values,
)


def configure(fields: Fields) -> ModelConfig:
    fields = (fields.section("text_config") or fields).with_defaults(_DEFAULTS)
    if fields.has("use_bidirectional_attention") and fields.text("use_bidirectional_attention") != "vision":
        raise fields.refuse("use_bidirectional_attention", "but tokens of text attend to earlier ones alone")
    layers = layer_count(fields)
    windows = (*typed_windows(fields, ((i + 1) % PATTERN > 0 for i in range(layers)))[:-1], None)
    unshared, vocab_size = layers - _shared_layers(fields, windows), fields.integer("vocab_size")
    inputs = fields.integer("hidden_size_per_layer_input", minimum=0)
    if inputs and fields.integer("vocab_size_per_layer_input", vocab_size) != vocab_size:
        raise fields.refuse("vocab_size_per_layer_input", "but must be the vocab_size")
    plain = gemma(
        fields,
        "gemma4",
        rope=_rope(fields, _LOCAL, fields.integer("head_dim")),
        qk_norm="head",
        scale=1.0,
        windows=windows,
        logit_softcap=fields.positive("final_logit_softcapping") if fields.has("final_logit_softcapping") else None,
    )
    shared_layers: list[Layer] = []
    for number, layer in enumerate(plain.layers):
        mixer = layer.mixer
        assert isinstance(mixer, Attention)
        mixer = mixer if mixer.window else _without_window(fields, number, mixer)
        ffn = layer.ffn
        if number >= unshared and fields.flag("use_double_wide_mlp", False) and isinstance(ffn, GatedMLP):
            ffn = replace(ffn, size=2 * ffn.size)
        ffn = _experts(fields, ffn) if fields.flag("enable_moe_block", False) else ffn
        whole = mixer.window is not None and fields.has("use_bidirectional_attention")
        mixer = replace(mixer, v_norm=True, shares_kv=number >= unshared, images_whole=whole)
        shared_layers.append(replace(layer, mixer=mixer, ffn=ffn, scaled=True))
    return replace(plain, layers=tuple(shared_layers), layer_embedding=inputs)


def tensors(config: ModelConfig) -> TensorTable:
    scale = {"layer_scale": (("layer_scalar", "layer_output_scale.weight"),)}
    table = tensor_table(config, {**NORMS, **QK_NORMS, **PROJECTIONS, **_EXPERTS, **_EMBEDDING, **scale})
    size, e = config.layer_embedding, config.hidden_size
    if not size:
        return table
    rows, top_specs = len(config.layers) * size, {}
    for slot, theirs, ggml, shape in (
        ("layer_embedding", "embed_tokens_per_layer", "per_layer_token_embd", (config.vocab_size, rows)),
        ("layer_projection", "per_layer_model_projection", "per_layer_model_proj", (rows, e)),
        ("layer_projection_norm", "per_layer_projection_norm", "per_layer_proj_norm", (size,)),
    ):
        factor = 2**-0.5 if slot == "layer_projection_norm" else 1.0  # scales the sum of both inputs
        top_specs[slot] = (TensorSpec(f"model.{theirs}.weight", f"{ggml}.weight", shape, factor=factor),)
    return replace(table, top={**table.top, **top_specs})


def _shared_layers(fields: Fields, windows: Sequence[int | None]) -> int:
    shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    if shared and not set(windows[-shared:]) <= set(windows[:-shared]):
        raise fields.refuse("num_kv_shared_layers", "but no layer before these has K/V of each kind")
    return shared


def _experts(fields: Fields, dense: Ffn | None) -> Experts:
    assert isinstance(dense, GatedMLP)
    fields = fields.with_file_keys({"num_experts_per_tok": "top_k_experts"}).with_values({"hidden_act": None})
    return experts(fields, activation=dense.activation, renormalize=True, shared=dense, factors=True, own_norms=True)


def _without_window(fields: Fields, number: int, mixer: Attention) -> Attention:
    """The attention of a layer without a window, by its entry in `per_layer_config` or by the keys for all of them."""
    shared = fields.flag("attention_k_eq_v", False)
    if fields.has("per_layer_config"):  # it has the layers that differ from the others
        by_layer = fields.section("per_layer_config")
        settings = (by_layer and by_layer.section(str(number))) or Fields({}, fields.where)
        head_dim = settings.integer("head_dim", mixer.head_dim, maximum=MAX_SIZE)
        kv_heads = settings.integer("num_key_value_heads", mixer.kv_heads, maximum=MAX_HEADS)
    else:
        head_dim = fields.integer("global_head_dim", maximum=MAX_SIZE)
        kv_heads = mixer.kv_heads
        if fields.has("num_global_key_value_heads") and shared:
            kv_heads = fields.integer("num_global_key_value_heads", maximum=MAX_HEADS)
    if head_dim % 2:
        raise fields.refuse("global_head_dim", f"but RoPE needs an even number of channels per head, not {head_dim}")
    if mixer.heads % kv_heads:
        raise fields.refuse("num_attention_heads", f"which is not a multiple of the {kv_heads} key/value heads")
    rope = _rope(fields, _FULL, head_dim)
    return replace(mixer, head_dim=head_dim, kv_heads=kv_heads, rope=rope, values_are_keys=shared)


def _rope(fields: Fields, kind: str, head_dim: int) -> RopeConfig:
    """RoPE of the layers of a kind."""
    context, by_kind = fields.integer("max_position_embeddings"), fields.section("rope_parameters")
    section = by_kind.section(kind) if by_kind is not None else None
    if section is None:
        default = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": THETA}
        section = Fields(default if kind == _FULL else {"rope_theta": LOCAL_THETA}, fields.where)
    return proportional(fields, context, section, head_dim, theta=THETA)
