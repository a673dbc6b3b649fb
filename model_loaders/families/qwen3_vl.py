"""Qwen3-VL: Qwen3 with RoPE in sections, which take turns."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _sections
from polarlm.model_loaders.families._decoder import IMAGE_PREFIXES, decoder, plain_tensors
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_text")
ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)
PREFIXES = IMAGE_PREFIXES
GGUF = GgufLayout("qwen3vl", keys=_sections.SECTIONS_KEY)
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    fields = _sections.text_part(fields)
    config = decoder(fields, "qwen3_vl", head_dim=128, bias=None, qk_norm="head")
    return _sections.with_sections(config, fields, (24, 20, 20))
