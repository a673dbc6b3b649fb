"""Seed-OSS: Llama with biases on q, k and v."""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, decoder
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("SeedOssForCausalLM",)
GGUF = GgufLayout("seed_oss")
_FFN_NORM = {"ffn_norm": (("post_attention_layernorm", "post_attention_norm"),)}
tensors = partial(tensor_table, names={**PRE_NORMS, **_FFN_NORM, **PROJECTIONS})


def configure(fields: Fields) -> ModelConfig:
    bias, out_bias = fields.flag("attention_bias", True), fields.flag("attention_out_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    return decoder(fields, "seed_oss", bias=bias, out_bias=out_bias, mlp_bias=mlp_bias, head_dim=128)
