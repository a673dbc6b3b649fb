"""What families with latent attention have in common: keys of the configuration, names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polarlm.model_loaders import elementary
from polarlm.model_loaders.config import Attention, GatedMLP, LatentAttention, ModelConfig, RopeConfig
from polarlm.model_loaders.families._decoder import MAX_DIM, PRE_NORMS, PROJECTIONS, decoder, dense_first
from polarlm.model_loaders.families._experts import EXPERTS, GGUF_KEYS, MTP, SHARED_BESIDE, experts
from polarlm.model_loaders.families._gguf import LOG_MULTIPLIER, GgufLayout, without_last
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names, TensorSpec, TensorTable, tensor_table

ATTENTION: Names = {
    "q_down": (("self_attn.q_a_proj", "attn_q_a"),),
    "q_latent_norm": (("self_attn.q_a_layernorm", "attn_q_a_norm"),),
    "kv_down": (("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),),
    "kv_norm": (("self_attn.kv_a_layernorm", "attn_kv_a_norm"),),
    "latent_keys": (("self_attn.k_b_proj.{}", "attn_k_b"),),
    "latent_values": (("self_attn.v_b_proj.{}", "attn_v_b"),),
}
_NO_NAMES: Names = {}
_SIGMOID = 2  # llama.cpp's number of this scoring


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """The keys of RoPE that other architectures have not, and whose names in GGUF files mean something else."""
    rope, multiplier = values["rope_parameters"], values["log_multiplier"]
    implied = {**without_last(values), "scoring_func": "sigmoid" if values["gating"] == _SIGMOID else "softmax"}
    if values["key_length"] is None:  # older files have the lengths of a head elsewhere
        values = {**values, "key_length": values["head_dim"], "v_head_dim": values["value_length"]}
        implied["v_head_dim"] = values["v_head_dim"]
    if isinstance(key_length := values["key_length"], int) and isinstance(rotated := values["qk_rope_head_dim"], int):
        implied["qk_nope_head_dim"] = key_length - rotated
    if isinstance(rope, dict) and isinstance(multiplier, float):  # llama.cpp takes mscale for the same
        implied["rope_parameters"] = {**rope, "mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    return implied


GGUF = GgufLayout(
    "deepseek2",
    interleaved=True,
    keys={
        **GGUF_KEYS,
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "gating": "expert_gating_func",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "layers_after_last": "nextn_predict_layers",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "key_length": "attention.key_length_mla",
        "v_head_dim": "attention.value_length_mla",
        "value_length": "attention.value_length",
        "qk_rope_head_dim": "rope.dimension_count",
        "log_multiplier": LOG_MULTIPLIER,
    },
    implied_values=_implied_values,
)


def latent_decoder(fields: Fields, family: str, **experts_settings: Any) -> ModelConfig:
    """The configuration of a decoder with latent attention, and experts after its first layers.

    experts_settings: further fields of `Experts`.
    """
    if not fields.flag("rope_interleave", True):
        raise fields.refuse("rope_interleave", "but pairs of RoPE that are no neighbours are not supported")
    own, rotated, value, latent = (
        fields.integer(key, maximum=MAX_DIM)
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    if latent % 2:
        raise fields.refuse("kv_lora_rank", "but a latent vector needs an even number of channels")
    query_latent = fields.integer("q_lora_rank", maximum=MAX_DIM) if fields.has("q_lora_rank") else 0
    settings: dict[str, Any] = {**_groups(fields), **experts_settings}
    shared = fields.integer("n_shared_experts", 0, minimum=0) * fields.integer("moe_intermediate_size")
    expert_ffn = experts(
        fields,
        renormalize=fields.flag("norm_topk_prob", False),
        scale=fields.positive("routed_scaling_factor", 1.0),
        shared=GatedMLP(shared) if shared else None,
        **settings,
    )
    if expert_ffn.count % expert_ffn.groups or expert_ffn.count // expert_ffn.groups < expert_ffn.best_of_group:
        raise fields.refuse("n_group", f"which does not divide {expert_ffn.count} experts into groups")
    if expert_ffn.top_k > expert_ffn.count // expert_ffn.groups * expert_ffn.top_groups:
        raise fields.refuse("topk_group", f"but {expert_ffn.top_k} experts are chosen, more than these groups have")
    ffns = dense_first(fields, fields.integer("first_k_dense_replace", 0, minimum=0), expert_ffn)
    kept = {"num_key_value_heads": fields.integer("num_attention_heads"), "head_dim": rotated}
    config = decoder(fields.with_values(kept), family, bias=None, ffns=ffns)

    def latent_attention(one: Attention) -> LatentAttention:
        return LatentAttention(
            **{
                **vars(one),
                "kv_heads": 1,
                "head_dim": latent + rotated,
                "rotary_dim": rotated,
                "scale": (own + rotated) ** -0.5 * _stretch(one.rope) ** 2,
            },
            own_dim=own,
            value_dim=value,
            query_latent=query_latent,
        )

    return config.with_attention(latent_attention)


def _groups(fields: Fields) -> dict[str, int]:
    """`Experts.groups` and `Experts.top_groups`; none where experts are chosen among all, whatever their groups."""
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if fields.text("topk_method", "") == "greedy" or groups <= top_groups:
        return {}
    return {"groups": groups, "top_groups": top_groups}


def _stretch(rope: RopeConfig | None) -> float:
    """The factor of queries and of keys by which yarn sharpens attention over a longer context."""
    if rope is None or rope.kind != "yarn" or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * float(elementary.log(rope.factor)) + 1


def latent_tensors(config: ModelConfig, more: Names = _NO_NAMES) -> TensorTable:
    """The tensors of a decoder with latent attention, whose heads' matrices many files have in one tensor. more: names
    that the family has besides others, or instead."""
    plain = {"out": PROJECTIONS["out"], "gate_up": PROJECTIONS["gate_up"], "down": PROJECTIONS["down"]}
    theirs, ggml = ("q_b_proj", "attn_q_b") if _attention(config).query_latent else ("q_proj", "attn_q")
    names = {**PRE_NORMS, **ATTENTION, **plain, **EXPERTS, **SHARED_BESIDE, **MTP, **more}
    table = tensor_table(config, {**names, "q_up": ((f"self_attn.{theirs}", ggml),)})
    layers = []
    for number, (slots, layer) in enumerate(zip(table.layers, config.layers, strict=True)):
        mixer = layer.mixer
        if not isinstance(mixer, LatentAttention):
            layers.append(slots)
            continue
        keys, values = (
            tuple(_head_part(spec, head, mixer, side, number) for head, spec in enumerate(slots[slot]))
            for side, slot in enumerate(("latent_keys", "latent_values"))
        )
        rows = tuple(
            replace(one, name=f"{one.name}.T", gguf="", shape=one.shape[::-1], copy_of=one.name, row_parts=None)
            for one in keys
        )
        layers.append({**slots, "latent_keys": keys, "latent_key_rows": rows, "latent_values": values})
    return replace(table, layers=tuple(layers))


def _attention(config: ModelConfig) -> LatentAttention:
    assert isinstance(config.attention, LatentAttention)
    return config.attention


def _head_part(spec: TensorSpec, head: int, mixer: LatentAttention, side: int, layer: int) -> TensorSpec:
    """The spec of the keys (side 0) or values of a head, which may be rows of a tensor of all heads: first a head's
    keys, whose columns are the matrix's rows, then its values."""
    whole = TensorSpec(f"model.layers.{layer}.self_attn.kv_b_proj.weight", "", ())
    sizes = [part for _ in range(mixer.heads) for part in (mixer.own_dim, mixer.value_dim)]
    part = whole.as_parts(tuple(sizes), 2 * head + side).row_parts
    assert part is not None
    parts = replace(part, gguf=f"blk.{layer}.attn_kv_b.weight")
    return replace(spec, row_parts=parts, is_transposed=side == 0)
