"""Muse Glimmer: norms of embeddings and of heads without weights, a gate of attention's result, and windows and RoPE in
three layers of four.

Of models for images and video it loads the text part.
"""

from __future__ import annotations

from dataclasses import replace

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PROJECTIONS, decoder, layer_count, typed_windows
from polarlm.model_loaders.families._gemma import NORMS
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import TensorTable, tensor_table
from polarlm.model_loaders.rope import rope_config

MODEL_TYPES = ("muse_glimmer", "muse_glimmer_text")
ARCHITECTURES = ("MuseGlimmerForConditionalGeneration", "MuseGlimmerForCausalLM")
PREFIXES = {"model.language_model.": "model."}
_GATE = {"output_gate": (("self_attn.gate_proj", "attn_gate"),)}
_DEFAULTS = {  # values of the 30B model, which configurations may omit
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
}
_PATTERN = 4  # counted from the last layer, every fourth has no window and no RoPE


def configure(fields: Fields) -> ModelConfig:
    if (text := fields.section("text_config")) is not None:  # the whole model says whether its head is the embedding
        fields = text.with_values({"tie_word_embeddings": fields.flag("tie_word_embeddings", False)})
    fields = fields.with_defaults(_DEFAULTS)
    count = layer_count(fields)
    whole = [(count - 1 - layer) % _PATTERN == 0 for layer in range(count)]
    rope = rope_config(fields, fields.integer("max_position_embeddings"))
    thetas = tuple(0.0 if one else rope.theta for one in whole)
    if fields.has("layer_rope_theta"):
        thetas = fields.numbers("layer_rope_theta", minimum=0.0)
    if len(thetas) != count or not set(thetas) <= {0.0, rope.theta}:
        raise fields.refuse("layer_rope_theta", f"but must say 0 or {rope.theta:g} for {count} layers")
    config = decoder(
        fields,
        "muse_glimmer",
        activation_key="hidden_activation",
        rope=rope,
        bias=None,
        qk_norm="unweighted",
        norms="both",
        scale=fields.positive("qk_scale_factor") * fields.integer("head_dim") ** -0.5,
        windows=typed_windows(fields, (not one for one in whole)),
        ropes=[rope if theta else None for theta in thetas],
        logit_softcap=fields.positive("final_logit_softcapping"),
        output_gate=True,
    )
    return replace(
        config,
        post_norm_eps=fields.positive("post_norm_eps"),
        embedding_norm=True,
        logit_scale=fields.positive("output_multiplier"),
    )


def tensors(config: ModelConfig) -> TensorTable:
    table = tensor_table(config, {**NORMS, **PROJECTIONS, **_GATE}, norm_offset=1.0)
    (norm,) = table.top["norm"]
    return replace(table, top={**table.top, "norm": (replace(norm, offset=0.0),)})
