"""Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in every layer."""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, decoder, layer_count, same_windows
from polarlm.model_loaders.families._experts import experts
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("MixtralForCausalLM",)  # GGUF files call them llama
EXPERTS = {
    "router": (("block_sparse_moe.gate", "ffn_gate_inp"),),
    "experts_gate_up": (
        ("block_sparse_moe.experts.{}.w1", "ffn_gate_exps"),
        ("block_sparse_moe.experts.{}.w3", "ffn_up_exps"),
    ),
    "experts_down": (("block_sparse_moe.experts.{}.w2", "ffn_down_exps"),),
}
tensors = partial(tensor_table, names={**PRE_NORMS, **PROJECTIONS, **EXPERTS})


def configure(fields: Fields) -> ModelConfig:
    expert_ffn = experts(fields, size_key="intermediate_size", renormalize=True)
    return decoder(fields, "mixtral", windows=same_windows(fields), ffns=[expert_ffn] * layer_count(fields))
