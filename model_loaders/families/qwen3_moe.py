"""Qwen3 with a mixture of experts: 30B-A3B, Coder 30B-A3B, 235B-A22B."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, qwen_windows
from polarlm.model_loaders.families._experts import GGUF_KEYS, expert_tensors, experts, qwen_layers
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
GGUF = GgufLayout("qwen3moe", keys=GGUF_KEYS, implied_values=lambda values: {"norm_topk_prob": True})
tensors = expert_tensors


def configure(fields: Fields) -> ModelConfig:
    ffns = qwen_layers(fields, experts(fields, renormalize=fields.flag("norm_topk_prob", False)))
    windows = qwen_windows(fields)
    return decoder(fields, "qwen3_moe", head_dim=128, bias=None, qk_norm="head", windows=windows, ffns=ffns)
