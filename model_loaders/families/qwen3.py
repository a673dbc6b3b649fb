"""Qwen3: every head of q and k is normalized before RoPE; biases only if configured; heads of 128 channels."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, plain_tensors, qwen_windows
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model")
GGUF = GgufLayout("qwen3")
PREFIXES = {one: f"model.{one}" for one in ("embed_tokens.", "layers.", "norm.")}  # prefixes in Qwen3-Embedding's files
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    return decoder(fields, "qwen3", head_dim=128, bias=None, qk_norm="head", windows=qwen_windows(fields))
