"""MiniMax M2: experts chosen by sigmoid scores and a bias; one norm over all heads of q, and one of k; partial RoPE.

Layers that predict several tokens are not loaded.
"""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, QK_NORMS, decoder, layer_count
from polarlm.model_loaders.families._experts import GGUF_KEYS, experts
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.families.mixtral import EXPERTS
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
GGUF = GgufLayout(
    "minimax-m2",
    keys={**GGUF_KEYS, "intermediate_size": "expert_feed_forward_length", "rotary_dim": "rope.dimension_count"},
)
_BIAS = {"choice_bias": (("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),)}
tensors = partial(tensor_table, names={**PRE_NORMS, **QK_NORMS, **PROJECTIONS, **EXPERTS, **_BIAS})


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults({"rope_theta": 5_000_000.0, "head_dim": 128})
    expert_ffn = experts(fields, size_key="intermediate_size", scoring="sigmoid", renormalize=True, choice_bias=True)
    return decoder(fields, "minimax_m2", partial_rope=True, qk_norm="all", ffns=[expert_ffn] * layer_count(fields))
