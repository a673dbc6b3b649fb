"""What Gemma's generations have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polarlm.model_loaders.config import Activation
from polarlm.model_loaders.files.tensor_table import Names

ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
NORMS: Names = {
    "attention_norm": (("input_layernorm", "attn_norm"),),
    "attention_post_norm": (("post_attention_layernorm", "post_attention_norm"),),
    "ffn_norm": (("pre_feedforward_layernorm", "ffn_norm"),),
    "ffn_post_norm": (("post_feedforward_layernorm", "post_ffw_norm"),),
}


def scale_in_gguf(layers: int) -> Callable[[Mapping[str, object]], Mapping[str, object]]:
    """The scale of attention, as in llama.cpp: only the 27B model, which has `layers` layers, differs."""

    def implied(values: Mapping[str, object]) -> Mapping[str, object]:
        size, heads, count = (values[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        if count == layers and isinstance(size, int) and isinstance(heads, int) and heads > 0:
            return {"query_pre_attn_scalar": size / heads}
        return {"query_pre_attn_scalar": values["head_dim"]}

    return implied
