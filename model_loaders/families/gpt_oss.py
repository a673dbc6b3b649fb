"""gpt-oss 20b and 120b: experts with biases, attention with sink scores, and a window in every second layer.

The safetensors have the matrices of a layer's experts in one tensor, of MXFP4 in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from polarlm.model_loaders.config import Experts, ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, decoder, layer_count, typed_windows
from polarlm.model_loaders.families._experts import EXPERTS, GGUF_KEYS, experts
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.joined_experts import SUFFIXES, split_experts
from polarlm.model_loaders.files.tensor_table import tensor_table
from polarlm.model_loaders.files.tensors import StoredTensor

ARCHITECTURES = ("GptOssForCausalLM",)
QUANTIZATIONS = ("mxfp4",)
ALTERNATE = True


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """GGUF files do not say that yarn's range of channels is not rounded.

    llama.cpp rounds it for every model, so its logits move away from transformers' with the position: on a random model
    from 1e-5 in the first row to a tenth after forty, and more where a router then chooses other experts.
    """
    rope = values["rope_parameters"]
    return {
        "intermediate_size": values["moe_intermediate_size"] or values["intermediate_size"],
        "rope_parameters": {**rope, "truncate": False} if isinstance(rope, Mapping) and rope else rope,
    }


GGUF = GgufLayout(
    "gpt-oss", keys={**GGUF_KEYS, "sliding_window": "attention.sliding_window"}, implied_values=_implied_values
)
_NAMES = {
    **PRE_NORMS,
    "ffn_norm": (("post_attention_layernorm", "post_attention_norm"),),
    **PROJECTIONS,
    "sink_scores": (("self_attn.sinks", "attn_sinks.weight"),),
    **EXPERTS,
    "router": (("mlp.router", "ffn_gate_inp"),),
}
_CONSTANTS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # constants of the activation
_GATE_UP = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
_DOWN = ("mlp.experts.{}.down_proj",)
tensors = partial(tensor_table, names=_NAMES)


def configure(fields: Fields) -> ModelConfig:
    for key, value in _CONSTANTS.items():
        if fields.number(key, value) != value:
            raise fields.refuse(key, f"but only {value:g} is supported")
    count, bias = layer_count(fields), fields.flag("attention_bias", True)
    settings = {"activation": "swiglu_clamped", "bias": True, "router_bias": True, "renormalize": True}
    ffns = [experts(fields, size_key="intermediate_size", **settings)] * count
    windows = typed_windows(fields, (layer % 2 == 0 for layer in range(count)))
    return decoder(fields, "gpt_oss", head_dim=64, bias=bias, windows=windows, ffns=ffns, sink_scores=True)


def take_apart(config: ModelConfig, file_tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    tensors, ffn, size = dict(file_tensors), config.ffn, config.hidden_size
    assert isinstance(ffn, Experts)
    parts = ("gate_up_proj", _GATE_UP, (ffn.size, size)), ("down_proj", _DOWN, (size, ffn.size))
    for layer in range(len(config.layers)):
        prefix = f"model.layers.{layer}."
        for name, names, shape in parts:
            whole, layer_names = f"{prefix}mlp.experts.{name}", tuple(prefix + each for each in names)
            tensors |= split_experts(file_tensors, whole, layer_names, ffn.count, *shape)
            for suffix in SUFFIXES:
                tensors.pop(whole + suffix, None)
    return tensors
