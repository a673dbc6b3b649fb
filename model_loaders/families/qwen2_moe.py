"""Qwen1.5 and Qwen2 with a mixture of experts, and a shared one with a gate: A2.7B, 57B-A14B."""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, decoder, qwen_windows
from polarlm.model_loaders.families._experts import EXPERTS, SHARED, SHARED_GGUF_KEYS, experts_with_shared, qwen_layers
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
GGUF = GgufLayout("qwen2moe", keys=SHARED_GGUF_KEYS)
tensors = partial(tensor_table, names={**PRE_NORMS, **PROJECTIONS, **EXPERTS, **SHARED})


def configure(fields: Fields) -> ModelConfig:
    expert_ffn = experts_with_shared(fields, renormalize=fields.flag("norm_topk_prob", False))
    bias, ffns = fields.flag("qkv_bias", True), qwen_layers(fields, expert_ffn)
    return decoder(fields, "qwen2_moe", qkv_bias=bias, windows=qwen_windows(fields), ffns=ffns)
