"""GLM-4-0414, GLM 4.1V and GLM-OCR: norms before and after attention and network, RoPE on neighbouring channels.

RoPE rotates a part of the channels, and in models for images in sections.
"""

from __future__ import annotations

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _sections
from polarlm.model_loaders.families._decoder import IMAGE_PREFIXES, PROJECTIONS, decoder
from polarlm.model_loaders.families._gguf import GgufLayout, without_last
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

_BIASED = ("glm4v", "glm4v_text")  # whatever the configuration says
MODEL_TYPES = ("glm4", *_BIASED, "glm_ocr", "glm_ocr_text")
ARCHITECTURES = ("Glm4ForCausalLM", "Glm4vForConditionalGeneration", "GlmOcrForConditionalGeneration")
PREFIXES = IMAGE_PREFIXES
IS_INTERLEAVED = True
GGUF = GgufLayout(
    "glm4",
    interleaved=True,
    keys={
        "rotary_dim": "rope.dimension_count",
        "layers_after_last": "nextn_predict_layers",
        **_sections.SECTIONS_KEY,
    },
    implied_values=without_last,
)
_NAMES = {
    "attention_norm": (("input_layernorm", "attn_norm"),),
    "attention_post_norm": (("post_self_attn_layernorm", "post_attention_norm"),),
    "ffn_norm": (("post_attention_layernorm", "ffn_norm"),),
    "ffn_post_norm": (("post_mlp_layernorm", "post_ffw_norm"),),
    **PROJECTIONS,
    "gate_up": (("mlp.gate_up_proj", "ffn_up"),),
}
tensors = partial(tensor_table, names=_NAMES)


def configure(fields: Fields) -> ModelConfig:
    fields = _sections.text_part(fields)
    kind = fields.text("model_type")
    if kind == "glm4":
        fields = fields.with_defaults({"partial_rotary_factor": 0.5})
    bias = kind in _BIASED or (kind == "glm4" and fields.flag("attention_bias", False))
    config = decoder(fields, "glm4", partial_rope=True, qkv_bias=bias, norms="both")
    return _sections.with_glm_sections(config, fields)
