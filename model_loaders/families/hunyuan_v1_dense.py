"""Hunyuan dense: Llama with norms of queries and keys after RoPE, whose base grows with a factor alpha."""

from dataclasses import replace
from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, decoder
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table
from polarlm.model_loaders.rope import rope_config

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM",)
GGUF = GgufLayout("hunyuan-dense")  # its files have the base that alpha makes
_QK_NORMS = {
    "q_norm": (("self_attn.query_layernorm", "attn_q_norm"),),
    "k_norm": (("self_attn.key_layernorm", "attn_k_norm"),),
}
tensors = partial(tensor_table, names={**PRE_NORMS, **_QK_NORMS, **PROJECTIONS})


def configure(fields: Fields) -> ModelConfig:
    fields.require("use_qk_norm", True)
    section, alpha = fields.section("rope_parameters") or fields.section("rope_scaling"), 1.0
    if section is not None and section.has("alpha") and "dynamic" in map(section.value, ("rope_type", "type")):
        section, alpha = section.with_values({"rope_type": "default"}), section.positive("alpha")
    rope = rope_config(fields, fields.integer("max_position_embeddings"), section=section)
    config = decoder(fields, "hunyuan_v1_dense", rope=rope, bias=None, qk_norm="after_rope")
    # NTK-aware RoPE: the slowest pair of channels turns alpha times slower, the fastest as before. The norms after it
    # undo a factor of cos and sin.
    power = config.attention.head_dim / max(1, config.attention.head_dim - 2)
    rope = replace(rope, theta=rope.theta * alpha**power, attention_factor=1.0)
    return config.with_attention(lambda attention: replace(attention, rope=rope))
