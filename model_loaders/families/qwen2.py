"""Qwen2 and Qwen2.5: biases on q, k and v; windows in the upper layers if the configuration enables them."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, plain_tensors, qwen_windows
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("Qwen2ForCausalLM",)
GGUF = GgufLayout("qwen2")
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    return decoder(fields, "qwen2", qkv_bias=True, windows=qwen_windows(fields))
