"""Command R, Aya 23 and Aya Expanse: attention and network side by side, and RoPE on neighbouring channels."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _cohere
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("CohereForCausalLM",)
GGUF = GgufLayout("command-r", interleaved=True, keys=_cohere.GGUF_KEYS)
IS_INTERLEAVED = True
tensors = _cohere.tensors


def configure(fields: Fields) -> ModelConfig:
    fields.require("use_qk_norm", False)  # Command R+ has it
    return _cohere.cohere(_cohere.with_defaults(fields), "cohere")
