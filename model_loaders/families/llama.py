"""Llama 2, 3, 3.1 and 3.2, and models of the same architecture: SmolLM2, TinyLlama, Yi."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, plain_tensors
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("LlamaForCausalLM",)
GGUF = GgufLayout("llama", interleaved=True)
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    return decoder(fields, "llama", bias=None, mlp_bias=fields.flag("mlp_bias", False))
