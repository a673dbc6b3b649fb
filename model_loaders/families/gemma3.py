"""Gemma 3: norms before and after attention and feed-forward, GELU, two kinds of RoPE, windows in five layers of six.

The rows of an image see each other. EmbeddingGemma is an encoder of the same
layers: its tokens see later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import (
    IMAGE_PREFIXES,
    PROJECTIONS,
    QK_NORMS,
    layer_count,
    typed_ropes,
    typed_windows,
)
from polarlm.model_loaders.families._gemma import (
    DEFAULTS,
    LOCAL_THETA,
    NORMS,
    PATTERN,
    THETA,
    gemma,
    scale_in_gguf,
)
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

MODEL_TYPES = ("gemma3", "gemma3_text")
ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel")
PREFIXES = {
    **IMAGE_PREFIXES,
    **{name: f"model.{name}" for name in ("embed_tokens.", "layers.", "norm.")},  # names in Gemma3TextModel
}
_DEFAULTS = {  # the 4B model's
    **DEFAULTS,
    "vocab_size": 262_208,
    "num_hidden_layers": 26,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_ENCODER = "gemma-embedding"


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    is_encoder = values["gguf_architecture"] == _ENCODER
    return {**scale_in_gguf(layers=62)(values), "use_bidirectional_attention": is_encoder}


GGUF = GgufLayout(
    "gemma3",
    other_architectures=(_ENCODER,),
    keys={
        "sliding_window": "attention.sliding_window",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "rope_local_base_freq": "rope.freq_base_swa",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    implied_values=_implied_values,
)
tensors = partial(tensor_table, names={**NORMS, **QK_NORMS, **PROJECTIONS}, norm_offset=1.0)


def configure(fields: Fields) -> ModelConfig:
    fields = (fields.section("text_config") or fields).with_defaults(_DEFAULTS)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.number(key, 0.0):
            raise fields.refuse(key, "but soft caps are supported for Gemma 2 alone: no released Gemma 3 has them")
    rope, local = typed_ropes(fields, THETA, LOCAL_THETA)
    pattern = fields.integer("sliding_window_pattern", PATTERN)
    windows = typed_windows(fields, ((layer + 1) % pattern > 0 for layer in range(layer_count(fields))))
    config = gemma(
        fields,
        "gemma3",
        rope=rope,
        qk_norm="head",
        scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        windows=windows,
        ropes=[rope if window is None else local for window in windows],
    )
    if fields.flag("use_bidirectional_attention", False):
        return replace(config.with_attention(lambda attention: replace(attention, is_causal=False)), tied_head=True)
    return config.with_attention(lambda attention: replace(attention, images_whole=True))
