"""nomic-embed-text: an encoder with RoPE, a gated network and no biases.

Its files spell keys as GPT-2's do, and call the gate's projection fc12 and the other one fc11.
"""

from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import GatedMLP, ModelConfig, RopeConfig
from polarlm.model_loaders.families._decoder import MAX_SIZE
from polarlm.model_loaders.families._encoder import encoder, layout, prefixes
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names, tensor_table
from polarlm.model_loaders.rope import rope_config

ARCHITECTURES = ("NomicBertModel",)
GGUF = layout("nomic-bert")
PREFIXES = prefixes("bert.", layers="encoder.layers", norm="emb_ln")
_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
_NAMES: Names = {
    "qkv": (("attn.Wqkv", "attn_qkv"),),
    "out": (("attn.out_proj", "attn_output"),),
    "attention_post_norm": (("norm1", "attn_output_norm"),),
    "gate_up": (("mlp.fc12", "ffn_gate"), ("mlp.fc11", "ffn_up")),
    "down": (("mlp.fc2", "ffn_down"),),
    "ffn_post_norm": (("norm2", "layer_output_norm"),),
}
_ALLOWED: dict[str, object] = {  # values of keys that change the arithmetic
    "activation_function": "swiglu",
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
}
tensors = partial(tensor_table, names=_NAMES)


def configure(fields: Fields) -> ModelConfig:
    if fields.has("n_embd"):
        for key, value in _ALLOWED.items():
            fields.require(key, value)
        fields, rope = fields.with_file_keys(_KEYS), RopeConfig(fields.number("rotary_emb_base", 1000.0, minimum=2.0))
    else:
        rope = rope_config(fields, fields.integer("max_position_embeddings"), theta=1000.0)
    ffn = GatedMLP(fields.integer("intermediate_size", maximum=MAX_SIZE), "silu")
    config = encoder(fields, "nomic_bert", ffn, rope=rope, has_biases=False, has_positions=False)
    # Beyond the trained positions RoPE would have to be stretched.
    return replace(config, max_context=min(config.max_context, fields.integer("max_trained_positions", 2048)))
