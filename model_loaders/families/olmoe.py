"""OLMoE 1B-7B: 64 experts in every layer; one norm over all heads of q, and one of k."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, layer_count
from polarlm.model_loaders.families._experts import GGUF_KEYS, expert_tensors, experts
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("OlmoeForCausalLM",)
GGUF = GgufLayout("olmoe", keys=GGUF_KEYS)
tensors = expert_tensors


def configure(fields: Fields) -> ModelConfig:
    if fields.has("clip_qkv"):
        raise fields.refuse("clip_qkv", "but clipping of queries, keys and values is not supported")
    expert_ffn = experts(fields, size_key="intermediate_size", renormalize=fields.flag("norm_topk_prob", False))
    return decoder(fields, "olmoe", bias=None, qk_norm="all", ffns=[expert_ffn] * layer_count(fields))
