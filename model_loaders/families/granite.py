"""Granite 3 and 4.1: Llama with factors of embeddings, scores, results of layers, and logits."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _granite
from polarlm.model_loaders.families._decoder import plain_tensors
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("GraniteForCausalLM",)
GGUF = GgufLayout("granite", interleaved=True, keys=_granite.GGUF_KEYS, implied_values=_granite.implied_values)
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults({"position_embedding_type": "rope"})
    return _granite.granite(fields, "granite", mlp_bias=fields.flag("mlp_bias", False))
