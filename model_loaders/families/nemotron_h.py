"""Nemotron-H, Nemotron 3 and 3.5: Mamba 2, attention without RoPE, and networks without a gate, dense or of experts.

Files number mixers and networks alike. Here a mixer and the network that follows it are a layer; some have no network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from polarlm.model_loaders.config import Activation, Ffn, Layer, ModelConfig
from polarlm.model_loaders.families._decoder import PROJECTIONS, decoder, gated_mlp, without_attention
from polarlm.model_loaders.families._experts import GGUF_KEYS, sigmoid_experts
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.families._mamba2 import GGUF_KEYS as MAMBA_KEYS
from polarlm.model_loaders.families._mamba2 import implied_values, mamba2, names
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import TensorSpec, TensorTable, tensor_table

ARCHITECTURES = ("NemotronHForCausalLM",)
PREFIXES = {"backbone.embeddings.": "model.embed_tokens.", "backbone.norm_f.": "model.norm.", "backbone.": "model."}
_MAMBA, _ATTENTION, _DENSE, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _DENSE, "E": _EXPERTS}
_OLDER = {**_LETTERS, "mamba": _MAMBA, "attention": _ATTENTION}
_KEYS = {  # Granite's → these files'
    "mamba_n_heads": "mamba_num_heads",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
_NORM = ("norm", "attn_norm")
_NAMES = {
    "attention_norm": (_NORM,),
    **names("mixer.", _NORM),
    "qkv": tuple((theirs.replace("self_attn.", "mixer."), ggml) for theirs, ggml in PROJECTIONS["qkv"]),
    "out": (("mixer.o_proj", "attn_output"),),
    "mtp_embedding_norm": (("enorm", "nextn.enorm"),),
    "mtp_hidden_norm": (("hnorm", "nextn.hnorm"),),
    "mtp_in": (("eh_proj", "nextn.eh_proj"),),
    "ffn_norm": (_NORM,),
    "gate_up": (("mixer.up_proj", "ffn_up"),),
    "down": (("mixer.down_proj", "ffn_down"),),
    "router": (("mixer.gate", "ffn_gate_inp"),),
    "choice_bias": (("mixer.gate.e_score_correction_bias", "exp_probs_b.bias"),),
    "experts_gate_up": (("mixer.experts.{}.up_proj", "ffn_up_exps"),),
    "experts_down": (("mixer.experts.{}.down_proj", "ffn_down_exps"),),
    "latent_in": (("mixer.fc1_latent_proj", "ffn_latent_down"),),
    "latent_out": (("mixer.fc2_latent_proj", "ffn_latent_up"),),
    "shared_gate_up": (("mixer.shared_experts.up_proj", "ffn_up_shexp"),),
    "shared_down": (("mixer.shared_experts.down_proj", "ffn_down_shexp"),),
    "mtp_norm": (("final_layernorm", "nextn.shared_head_norm"),),
}
_OF_NETWORK = tuple(list(_NAMES)[list(_NAMES).index("ffn_norm") :])
_ACTIVATION: Activation = "relu_squared"
_LAYER_PREFIX = re.compile(r"^(model\.layers|blk)\.\d+\.")


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """GGUF files list KV heads and sizes of networks, 0 where a layer has none. Experts have a bias of choice."""
    kv_heads, sizes, values_implied = values["num_key_value_heads"], values["intermediate_size"], implied_values(values)
    network, after_last = _EXPERTS if values["n_routed_experts"] else _DENSE, values["layers_after_last"]
    if isinstance(kv_heads, list) and isinstance(sizes, list) and len(kv_heads) == len(sizes):
        if isinstance(after_last, int) and 0 < after_last <= len(sizes):
            kv_heads, sizes = kv_heads[:-after_last], sizes[:-after_last]
        kinds = (
            network if size else _ATTENTION if heads else _MAMBA for heads, size in zip(kv_heads, sizes, strict=True)
        )
        values_implied["layers_block_type"] = list(kinds)
        values_implied["intermediate_size"] = max((size for size in sizes if type(size) is int), default=0)
    values_implied["layer_norm_epsilon"] = values["rms_norm_eps"]
    return values_implied


_SHARED_SIZE = "moe_shared_expert_intermediate_size"
_GGUF_KEYS = {
    **MAMBA_KEYS,
    "n_routed_experts": GGUF_KEYS["num_experts"],
    "num_experts_per_tok": GGUF_KEYS["num_experts_per_tok"],
    "moe_intermediate_size": GGUF_KEYS["moe_intermediate_size"],
    _SHARED_SIZE: "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "moe_latent_size": "moe_latent_size",
    "layers_after_last": "nextn_predict_layers",  # which predict several tokens; the lists have them, too
}
GGUF = GgufLayout(
    "nemotron_h",
    other_architectures=("nemotron_h_moe",),
    interleaved=True,
    keys=_GGUF_KEYS,
    implied_values=_implied_values,
)


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_file_keys(_KEYS).with_defaults({"rms_norm_eps": fields.positive("layer_norm_epsilon", 1e-5)})
    if fields.flag("attention_bias", False):
        raise fields.refuse("attention_bias", "but biases of projections are not supported")
    kinds = _kinds(fields)
    with_networks = [
        (kind == _ATTENTION, kinds[number + 1] if number + 1 < len(kinds) else "")
        for number, kind in enumerate(kinds)
        if kind in (_MAMBA, _ATTENTION)
    ]
    networks = {kind: _network(fields, kind) for kind in set(kinds) & {_DENSE, _EXPERTS}}
    count = len(with_networks)
    config = decoder(
        fields.with_values({"num_hidden_layers": count}),
        "nemotron_h",
        ropes=[None] * count,
        ffns=[*networks.values()][:1] * count,
    )
    mixer = mamba2(fields, config.norm_eps) if _MAMBA in kinds else None
    layers = (
        Layer(layer.mixer if attends or mixer is None else mixer, networks.get(network))
        for layer, (attends, network) in zip(config.layers, with_networks, strict=True)
    )
    return replace(config, layers=tuple(layers))


def _kinds(fields: Fields) -> Sequence[str]:
    key = "layers_block_type" if fields.has("layers_block_type") else "hybrid_override_pattern"
    value = fields.texts(key) if key == "layers_block_type" else fields.text(key)
    kinds = [_OLDER.get(kind, kind) for kind in value]
    if not kinds or not set(kinds) <= set(_LETTERS.values()):
        raise fields.refuse(key, f"but must name {', '.join(_LETTERS.values())} in order")
    networks = [kind in (_DENSE, _EXPERTS) for kind in kinds]
    if networks[0] or any(one and following for one, following in pairwise(networks)):
        raise fields.refuse(key, "but a network that does not follow Mamba 2 or attention is not supported")
    if not any(networks):
        raise fields.refuse(key, "but a model without networks is not supported")
    if _ATTENTION not in kinds:
        raise without_attention(fields, key)
    return kinds


def _network(fields: Fields, kind: str) -> Ffn:
    fields = fields.with_defaults({"mlp_hidden_act": "relu2"})
    if fields.text("mlp_hidden_act") != "relu2":
        raise fields.refuse("mlp_hidden_act", "but only relu2 is supported")
    fields = fields.with_values({"hidden_act": "silu"})  # the key of other families
    if kind == _DENSE:
        return replace(gated_mlp(fields), activation=_ACTIVATION)
    if fields.integer("n_group", 1) != 1:
        raise fields.refuse("n_group", "but experts that are chosen by groups are not supported")
    shared = None
    if fields.integer("n_shared_experts", 1, minimum=0):
        shared = replace(gated_mlp(fields, size_key=_SHARED_SIZE), activation=_ACTIVATION)
    latent = fields.integer("moe_latent_size", 0, minimum=0)
    return sigmoid_experts(fields, activation=_ACTIVATION, choice_bias=True, shared=shared, latent=latent)


def tensors(config: ModelConfig) -> TensorTable:
    """In GGUF files, attention and network of the layer that predicts several tokens have one number, not two."""
    table, number, layers = tensor_table(config, _NAMES), 0, []
    for layer, slots in zip(config.layers, table.layers, strict=True):
        mixer, network = ((f"model.layers.{one}.", f"blk.{one}.") for one in (number, number + 1))
        if "mtp_in" in slots:
            mixer, network = ("mtp.layers.0.", mixer[1]), ("mtp.layers.1.", mixer[1])
            name = f"blk.{number}.post_attention_norm.weight"
            slots = {**slots, "ffn_norm": tuple(replace(norm, gguf=name) for norm in slots.get("ffn_norm", ()))}
        layers.append(
            {key: _rename_specs(of, *(network if key in _OF_NETWORK else mixer)) for key, of in slots.items()}
        )
        number += 1 + (layer.ffn is not None)
    return replace(table, layers=tuple(layers))


def _rename_specs(specs: tuple[TensorSpec, ...], theirs: str, ggml: str) -> tuple[TensorSpec, ...]:
    """The specs with these beginnings of names, Hugging Face's and llama.cpp's, in place of the layer's number."""
    return tuple(
        replace(spec, name=_LAYER_PREFIX.sub(theirs, spec.name), gguf=_LAYER_PREFIX.sub(ggml, spec.gguf))
        for spec in specs
    )
