"""Llama 2, 3, 3.1 and 3.2, and what is built like them: SmolLM2, TinyLlama, Yi."""

from model_loaders.config import ModelConfig
from model_loaders.families._decoder import decoder
from model_loaders.fields import Fields

ARCHITECTURE = "LlamaForCausalLM"


def configure(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return decoder(fields, "llama", qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False))
