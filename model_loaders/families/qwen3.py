"""Qwen3: every head of q and k is normalized before RoPE; no biases unless asked for; heads of 128 channels."""

from model_loaders.config import ModelConfig
from model_loaders.families._decoder import decoder, qwen_windows
from model_loaders.fields import Fields

ARCHITECTURE = "Qwen3ForCausalLM"


def configure(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields, "qwen3", head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=qwen_windows(fields)
    )
