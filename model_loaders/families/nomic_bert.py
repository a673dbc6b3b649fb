"""nomic-embed-text: an encoder with RoPE and gated networks, in v2 biases, no gates, and experts in every second layer.

Its files spell keys as GPT-2's do, and call the gate's projection fc12 and the other one fc11.
"""

from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import GatedMLP, ModelConfig, RopeConfig
from polarlm.model_loaders.families._decoder import MAX_SIZE
from polarlm.model_loaders.families._encoder import encoder, layout, prefixes
from polarlm.model_loaders.families._experts import experts
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.joined_experts import split_layers
from polarlm.model_loaders.files.tensor_table import Names, TensorTable, tensor_table
from polarlm.model_loaders.rope import rope_config

ARCHITECTURES = ("NomicBertModel",)
_GGUF_KEYS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_GGUF_KEYS |= {"moe_every_n_layers": "moe_every_n_layers", **layout("").keys}
GGUF = replace(layout("nomic-bert"), other_architectures=("nomic-bert-moe",), keys=_GGUF_KEYS)
PREFIXES = prefixes("bert.", layers="encoder.layers", norm="emb_ln")
_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "num_experts_per_tok": "moe_top_k",
}
_NAMES: Names = {
    "qkv": (("attn.Wqkv", "attn_qkv"),),
    "out": (("attn.out_proj", "attn_output"),),
    "attention_post_norm": (("norm1", "attn_output_norm"),),
    "gate_up": (("mlp.fc12", "ffn_gate"), ("mlp.fc11", "ffn_up")),
    "down": (("mlp.fc2", "ffn_down"),),
    "ffn_post_norm": (("norm2", "layer_output_norm"),),
}
_NAMES_V2: Names = {
    **_NAMES,
    "gate_up": (("mlp.fc1", "ffn_up"),),
    "router": (("mlp.router.layer", "ffn_gate_inp"),),
    "experts_gate_up": (("mlp.experts.mlp.{}.w1", "ffn_up_exps"),),
    "experts_down": (("mlp.experts.mlp.{}.w2", "ffn_down_exps"),),
    "sum_bias": (("mlp.experts.bias", "ffn_exps.bias"),),
}
take_apart = partial(split_layers, prefix="mlp.experts.mlp.", gate_up=("w1", ("w1",)), down=("w2", ("w2",)))
_FALSE = "prenorm", "rotary_emb_interleaved", "moe_normalize_expert_weights", "expert_choice_router"
_BIASES = "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"


def tensors(config: ModelConfig) -> TensorTable:
    return tensor_table(config, _NAMES_V2 if config.attention.qkv_bias else _NAMES)


def configure(fields: Fields) -> ModelConfig:
    every = fields.integer("moe_every_n_layers", 0, minimum=0)
    is_v2, has_sum_bias = every > 0, fields.has("n_embd")
    if fields.has("n_embd"):
        allowed = {"activation_function": "gelu" if is_v2 else "swiglu", "rotary_emb_fraction": 1.0}
        for key, value in {**allowed, **dict.fromkeys(_FALSE, False), **dict.fromkeys(_BIASES, is_v2)}.items():
            fields.require(key, value)
        fields, rope = fields.with_file_keys(_KEYS), RopeConfig(fields.number("rotary_emb_base", 1000.0, minimum=2.0))
    else:
        rope = rope_config(fields, fields.integer("max_position_embeddings"), theta=1000.0)
    ffn = GatedMLP(fields.integer("intermediate_size", maximum=MAX_SIZE), "gelu" if is_v2 else "silu")
    config = encoder(fields, "nomic_bert", ffn, rope=rope, has_biases=is_v2, has_positions=False)
    if is_v2:
        routed = experts(fields, size_key="intermediate_size", activation="gelu", sum_bias=has_sum_bias)
        layers = enumerate(config.layers)
        config = replace(config, layers=tuple(replace(one, ffn=routed) if n % every == 1 else one for n, one in layers))
    # Beyond the trained positions RoPE would have to be stretched.
    return replace(config, max_context=min(config.max_context, fields.integer("max_trained_positions", 2048)))
