"""Qwen2 and Qwen2.5: biases on q, k and v, and windows in the upper layers where they are switched on."""

from model_loaders.config import ModelConfig
from model_loaders.families._decoder import decoder, qwen_windows
from model_loaders.fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"


def configure(fields: Fields) -> ModelConfig:
    return decoder(fields, "qwen2", qkv_bias=True, windows=qwen_windows(fields))
