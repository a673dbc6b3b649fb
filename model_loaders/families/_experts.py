"""What families with a mixture of experts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from polarlm.model_loaders.config import MOST_EXPERTS, Experts, Ffn
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, QK_NORMS, gated_mlp, layer_count
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.joined_experts import DOWN, GATE, UP, split_layers
from polarlm.model_loaders.files.tensor_table import Names, tensor_table

GGUF_KEYS = {  # for `GgufLayout`
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
EXPERTS: Names = {
    "router": (("mlp.gate", "ffn_gate_inp"),),
    "experts_gate_up": (("mlp.experts.{}.gate_proj", "ffn_gate_exps"), ("mlp.experts.{}.up_proj", "ffn_up_exps")),
    "experts_down": (("mlp.experts.{}.down_proj", "ffn_down_exps"),),
}
SHARED: Names = {  # Qwen's shared network
    "shared_gate": (("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),),
    "shared_gate_up": (
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ),
    "shared_down": (("mlp.shared_expert.down_proj", "ffn_down_shexp"),),
}
SHARED_BESIDE: Names = {  # a choice bias, and a shared network without a gate, as GLM and DeepSeek have them
    "choice_bias": (("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),),
    "shared_gate_up": (
        ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ),
    "shared_down": (("mlp.shared_experts.down_proj", "ffn_down_shexp"),),
}
MTP: Names = {  # of the layer that predicts several tokens, in the same families
    "mtp_embedding_norm": (("enorm", "nextn.enorm"),),
    "mtp_hidden_norm": (("hnorm", "nextn.hnorm"),),
    "mtp_in": (("eh_proj", "nextn.eh_proj"),),
    "mtp_norm": (("shared_head.norm", "nextn.shared_head_norm"),),
}
SHARED_GGUF_KEYS = {**GGUF_KEYS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
take_apart_joined = partial(
    split_layers, prefix="mlp.experts.", gate_up=("gate_up_proj", (GATE, UP)), down=(DOWN, (DOWN,))
)
"""`take_apart` of files that have the matrices of all experts in two tensors, and the gate before the up projection."""
expert_tensors = partial(tensor_table, names={**PRE_NORMS, **QK_NORMS, **PROJECTIONS, **EXPERTS})
"""The tensors of a decoder with Llama's names, and Qwen's names for experts."""
_COUNT_KEYS = "num_experts", "num_local_experts", "n_routed_experts"  # which of them depends on who wrote the file


def experts(fields: Fields, *, size_key: str = "moe_intermediate_size", **settings: Any) -> Experts:
    """A layer of experts whose sizes are in `fields`. settings: further fields of `Experts`.

    Raises LoadError if more are to be chosen than there are.
    """
    count = fields.integer(next(filter(fields.has, _COUNT_KEYS), _COUNT_KEYS[0]), maximum=MOST_EXPERTS)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > count:
        raise fields.refuse("num_experts_per_tok", f"but each layer has only {count} experts")
    one = gated_mlp(fields, size_key=size_key)
    return Experts(count, top_k, one.size, **{"activation": one.activation, **settings})


def sigmoid_experts(fields: Fields, **settings: Any) -> Experts:
    """Experts that are chosen by sigmoid scores. settings: further fields of `Experts`."""
    renormalize, scale = fields.flag("norm_topk_prob", True), fields.positive("routed_scaling_factor", 1.0)
    return experts(fields, scoring="sigmoid", renormalize=renormalize, scale=scale, **settings)


def experts_with_shared(fields: Fields, *, renormalize: bool) -> Experts:
    """Experts with Qwen's shared network, which has a gate."""
    shared = gated_mlp(fields, size_key="shared_expert_intermediate_size")
    return experts(fields, renormalize=renormalize, shared=shared, shared_gate=True)


def qwen_layers(fields: Fields, expert_ffn: Experts) -> Sequence[Ffn]:
    """The feed-forward network of each layer: every `decoder_sparse_step`-th has experts, unless `mlp_only_layers`
    names it."""
    step, dense = fields.integer("decoder_sparse_step", 1), set(fields.integers("mlp_only_layers"))
    has_experts = [(layer + 1) % step == 0 and layer not in dense for layer in range(layer_count(fields))]
    plain = expert_ffn if all(has_experts) else gated_mlp(fields)
    return [expert_ffn if one else plain for one in has_experts]
