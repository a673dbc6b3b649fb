"""What families have in common whose layers are Mamba 2, or every few layers attention without RoPE.

Keys of configurations are Granite's; other families translate theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

from polarlm.model_loaders.config import Mamba2
from polarlm.model_loaders.families._decoder import MAX_DIM, MAX_HEADS, MAX_WIDTH
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names

_BIASES = "mamba_proj_bias", "mlp_bias", "use_bias"
GGUF_KEYS = {  # for `GgufLayout`
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_inner_size": "ssm.inner_size",  # instead of mamba_d_head
}


def implied_values(values: Mapping[str, object]) -> dict[str, object]:
    """What GGUF files say in other words, and the KV heads of the layers that have attention."""
    inner, heads, kv_heads = values["mamba_inner_size"], values["mamba_n_heads"], values["num_key_value_heads"]
    values_implied: dict[str, object] = {}
    if isinstance(inner, int) and isinstance(heads, int) and heads:
        values_implied["mamba_d_head"] = inner // heads
    if isinstance(kv_heads, list) and all(type(one) is int for one in kv_heads):
        values_implied["num_key_value_heads"] = max(kv_heads, default=0)
    return values_implied


def names(prefix: str, norm: tuple[str, str]) -> Names:
    """The names of a layer's tensors. prefix: what Hugging Face's begin with, such as "mamba."."""
    return {
        "mamba_norm": (norm,),
        "mamba_in": ((f"{prefix}in_proj", "ssm_in"),),
        "mamba_conv": ((f"{prefix}conv1d", "ssm_conv1d"),),
        "mamba_decay": ((f"{prefix}A_log", "ssm_a"),),
        "mamba_dt_bias": ((f"{prefix}dt_bias", "ssm_dt.bias"),),
        "mamba_skip": ((f"{prefix}D", "ssm_d"),),
        "mamba_out_norm": ((f"{prefix}norm", "ssm_norm"),),
        "mamba_out": ((f"{prefix}out_proj", "ssm_out"),),
    }


def mamba2(fields: Fields, norm_eps: float) -> Mamba2:
    """The mixer of the layers that are Mamba 2."""
    for key in _BIASES:
        if fields.flag(key, False):
            raise fields.refuse(key, "but biases of projections are not supported")
    heads, groups = (fields.integer(key, maximum=MAX_HEADS) for key in ("mamba_n_heads", "mamba_n_groups"))
    if heads % groups:
        raise fields.refuse("mamba_n_heads", f"which is not a multiple of the {groups} groups")
    return Mamba2(
        groups,
        heads,
        fields.integer("mamba_d_state", maximum=MAX_DIM),
        fields.integer("mamba_d_head", maximum=MAX_DIM),
        fields.integer("mamba_d_conv", minimum=2, maximum=MAX_WIDTH),
        norm_eps=norm_eps,
        conv_bias=fields.flag("mamba_conv_bias", True),
    )
