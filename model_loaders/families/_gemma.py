"""What Gemma's generations have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from polarlm.model_loaders.config import Activation, ModelConfig
from polarlm.model_loaders.families._decoder import decoder
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names

_ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
NORMS: Names = {
    "attention_norm": (("input_layernorm", "attn_norm"),),
    "attention_post_norm": (("post_attention_layernorm", "post_attention_norm"),),
    "ffn_norm": (("pre_feedforward_layernorm", "ffn_norm"),),
    "ffn_post_norm": (("post_feedforward_layernorm", "post_ffw_norm"),),
}
DEFAULTS = {  # what published configurations of Gemma 3 and 4 may omit
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # in layers without a window, and with one
PATTERN = 6  # every sixth layer has no window


def gemma(fields: Fields, family: str, **settings: Any) -> ModelConfig:
    """`decoder` with what all generations share."""
    return decoder(
        fields,
        family,
        activations=_ACTIVATIONS,
        activation_key="hidden_activation",
        bias=None,
        norms="both",
        embedding_scale=math.sqrt,
        **settings,
    )


def scale_in_gguf(layers: int) -> Callable[[Mapping[str, object]], Mapping[str, object]]:
    """The scale of attention, as in llama.cpp: only the 27B model, which has `layers` layers, differs."""

    def implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
        size, heads, count = (values[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        if count == layers and isinstance(size, int) and isinstance(heads, int) and heads > 0:
            return {"query_pre_attn_scalar": size / heads}
        return {"query_pre_attn_scalar": values["head_dim"]}

    return implied_values
