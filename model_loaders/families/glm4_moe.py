"""GLM 4.5, 4.6, 4.5-Air and 4.5V: experts chosen by sigmoid scores and a bias, a shared one, and dense first layers.

RoPE rotates half of the channels, in GLM 4.5V in sections.
"""

from __future__ import annotations

from functools import partial

from polarlm.model_loaders.config import GatedMLP, ModelConfig
from polarlm.model_loaders.families import _sections
from polarlm.model_loaders.families._decoder import (
    IMAGE_PREFIXES,
    PRE_NORMS,
    PROJECTIONS,
    QK_NORMS,
    decoder,
    dense_first,
)
from polarlm.model_loaders.families._experts import EXPERTS, GGUF_KEYS, MTP, SHARED_BESIDE, sigmoid_experts
from polarlm.model_loaders.families._gguf import GgufLayout, without_last
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

MODEL_TYPES = ("glm4_moe", "glm4v_moe", "glm4v_moe_text")
ARCHITECTURES = ("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration")
PREFIXES = IMAGE_PREFIXES
GGUF = GgufLayout(
    "glm4moe",
    keys={
        **GGUF_KEYS,
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "rotary_dim": "rope.dimension_count",
        "layers_after_last": "nextn_predict_layers",
        **_sections.SECTIONS_KEY,
    },
    implied_values=without_last,
)
_NAMES = {
    **PRE_NORMS,
    "ffn_norm": (("post_attention_layernorm", "post_attention_norm"),),
    **QK_NORMS,
    **PROJECTIONS,
    **EXPERTS,
    **SHARED_BESIDE,
    **MTP,
}
tensors = partial(tensor_table, names=_NAMES)


def configure(fields: Fields) -> ModelConfig:
    fields = _sections.text_part(fields).with_defaults({"partial_rotary_factor": 0.5})
    for key in ("n_group", "topk_group"):
        if fields.integer(key, 1) != 1:
            raise fields.refuse(key, "but experts that are chosen by groups are not supported")
    size, shared = fields.integer("moe_intermediate_size"), fields.integer("n_shared_experts", 1, minimum=0)
    expert_ffn = sigmoid_experts(fields, choice_bias=True, shared=GatedMLP(size * shared) if shared else None)
    ffns = dense_first(fields, fields.integer("first_k_dense_replace", 1, minimum=0), expert_ffn)
    has_bias = fields.flag("attention_bias", fields.text("model_type").startswith("glm4v"))
    norm = "head" if fields.flag("use_qk_norm", False) else None
    config = decoder(fields, "glm4_moe", partial_rope=True, qkv_bias=has_bias, qk_norm=norm, ffns=ffns)
    return _sections.with_glm_sections(config, fields)
