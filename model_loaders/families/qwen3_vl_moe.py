"""Qwen3-VL with a mixture of experts: 30B-A3B, 235B-A22B."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import _sections
from polarlm.model_loaders.families._decoder import IMAGE_PREFIXES, decoder
from polarlm.model_loaders.families._experts import GGUF_KEYS, expert_tensors, experts, qwen_layers, take_apart_joined
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

MODEL_TYPES = ("qwen3_vl_moe", "qwen3_vl_moe_text")
ARCHITECTURES = ("Qwen3VLMoeForConditionalGeneration",)
PREFIXES = IMAGE_PREFIXES
GGUF = GgufLayout("qwen3vlmoe", keys={**GGUF_KEYS, **_sections.SECTIONS_KEY})
tensors = expert_tensors
take_apart = take_apart_joined


def configure(fields: Fields) -> ModelConfig:
    fields = _sections.text_part(fields)
    ffns = qwen_layers(fields, experts(fields, renormalize=True))
    config = decoder(fields, "qwen3_vl_moe", head_dim=128, bias=None, qk_norm="head", ffns=ffns)
    return _sections.with_sections(config, fields, (24, 20, 20))
