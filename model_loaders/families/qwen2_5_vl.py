"""Qwen2.5-VL: Qwen2 with RoPE in sections, which follow each other."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _sections
from polarlm.model_loaders.families._decoder import IMAGE_PREFIXES, decoder, plain_tensors, qwen_windows
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

MODEL_TYPES = ("qwen2_5_vl", "qwen2_5_vl_text")
ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)
PREFIXES = IMAGE_PREFIXES
GGUF = GgufLayout("qwen2vl", keys=_sections.SECTIONS_KEY)
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    fields = _sections.text_part(fields)
    config = decoder(fields, "qwen2_5_vl", qkv_bias=True, windows=qwen_windows(fields))
    return _sections.with_sections(config, fields, (16, 24, 24), take_turns=False)
