"""LFM2-MoE: LFM2 with experts, chosen by sigmoid scores and a bias, in all layers but the first ones."""

from __future__ import annotations

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, dense_first
from polarlm.model_loaders.families._experts import GGUF_KEYS, sigmoid_experts
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.families.lfm2 import LAST_NORM, NAMES, implied_values, with_convolutions, with_defaults
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("Lfm2MoeForCausalLM",)
GGUF = GgufLayout(
    "lfm2moe",
    keys={
        **GGUF_KEYS,
        "conv_L_cache": "shortconv.l_cache",
        "num_dense_layers": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
    },
    implied_values=implied_values,
)
_NAMES = {
    **NAMES,
    "router": (("feed_forward.gate", "ffn_gate_inp"),),
    "choice_bias": (("feed_forward.expert_bias", "exp_probs_b.bias"),),
    "experts_gate_up": (("feed_forward.experts.{}.w1", "ffn_gate_exps"), ("feed_forward.experts.{}.w3", "ffn_up_exps")),
    "experts_down": (("feed_forward.experts.{}.w2", "ffn_down_exps"),),
}
tensors = partial(tensor_table, names=_NAMES, last_norm=LAST_NORM)


def configure(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields)
    expert_ffn = sigmoid_experts(fields, choice_bias=fields.flag("use_expert_bias", True))
    ffns = dense_first(fields, fields.integer("num_dense_layers", 2, minimum=0), expert_ffn)
    return with_convolutions(fields, decoder(fields, "lfm2_moe", qk_norm="head", ffns=ffns))
