"""What Granite's families have in common: factors of embeddings, scores, results of layers, and logits.

Results of mixers and networks are multiplied by a number m before they are added. Here the residual stream is divided
by m instead, which norms undo if their epsilon is divided by m².
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, layer_count
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.rope import rope_config

GGUF_KEYS = {  # for `GgufLayout`
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "uses_rope": "rope.scaling.finetuned",
}


def implied_values(values: Mapping[str, object]) -> dict[str, object]:
    """Whether the attention of a GGUF file has RoPE: unless the file says no."""
    return {"position_embedding_type": "nope" if values["uses_rope"] is False else "rope"}


def granite(fields: Fields, family: str, **settings: Any) -> ModelConfig:
    """The configuration of a model whose layers have attention. settings: of `decoder`."""
    rope = None
    if fields.has("position_embedding_type") and fields.text("position_embedding_type") == "rope":
        rope = rope_config(fields, fields.integer("max_position_embeddings"))
    factor, scale = fields.positive("residual_multiplier", 1.0), fields.positive("attention_multiplier", 1.0)
    config = decoder(fields, family, bias=None, scale=scale, ropes=[rope] * layer_count(fields), **settings)
    return replace(
        config,
        norm_eps=config.norm_eps / factor**2,
        embedding_scale=fields.positive("embedding_multiplier", 1.0) / factor,
        logit_scale=1 / fields.positive("logits_scaling", 1.0),
    )
