"""DeepSeek V2 and V2-Lite: latent attention, experts chosen by softmax, and shared ones."""

from __future__ import annotations

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._latent import GGUF as GGUF
from polarlm.model_loaders.families._latent import latent_decoder, latent_tensors
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("DeepseekV2ForCausalLM",)
IS_INTERLEAVED = True
tensors = latent_tensors


def configure(fields: Fields) -> ModelConfig:
    if fields.text("scoring_func", "softmax") == "sigmoid":  # V3, which has the same name in GGUF files
        return latent_decoder(fields, "deepseek_v2", scoring="sigmoid", choice_bias=True)
    return latent_decoder(fields, "deepseek_v2")
