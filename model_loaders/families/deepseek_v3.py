"""DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash: V2 whose experts have sigmoid scores."""

from __future__ import annotations

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._latent import latent_decoder, latent_tensors
from polarlm.model_loaders.fields import Fields

MODEL_TYPES = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
IS_INTERLEAVED = True
tensors = latent_tensors


def configure(fields: Fields) -> ModelConfig:
    kind = fields.text("model_type")
    defaults = {"first_k_dense_replace": 1 if kind == "glm4_moe_lite" else 3, "norm_topk_prob": True}
    fields = fields.with_defaults(defaults)
    return latent_decoder(fields, "deepseek_v3", scoring="sigmoid", choice_bias=True)
