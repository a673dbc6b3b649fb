"""Gemma 2: soft caps, norms before and after attention and feed-forward, GELU, windows in every second layer."""

from __future__ import annotations

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PROJECTIONS, layer_count, typed_windows
from polarlm.model_loaders.families._gemma import NORMS, gemma, scale_in_gguf
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("Gemma2ForCausalLM",)
GGUF = GgufLayout(
    "gemma2",
    keys={
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    implied_values=scale_in_gguf(layers=46),
)
_DEFAULTS = {"sliding_window": 4096, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
# The caps where a configuration has no such key; null says that there is no cap.
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
tensors = partial(tensor_table, names={**NORMS, **PROJECTIONS}, norm_offset=1.0)


def configure(fields: Fields) -> ModelConfig:
    score_softcap, logit_softcap = (
        fields.positive(key) if fields.has(key) else None if key in fields.names() else default
        for key, default in _CAPS.items()
    )
    fields = fields.with_defaults(_DEFAULTS)
    if fields.flag("use_bidirectional_attention", False):
        raise fields.refuse("use_bidirectional_attention", "but only causal attention is supported")
    return gemma(
        fields,
        "gemma2",
        head_dim=256,
        scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        windows=typed_windows(fields, (layer % 2 == 0 for layer in range(layer_count(fields)))),
        softcap=score_softcap,
        logit_softcap=logit_softcap,
    )
