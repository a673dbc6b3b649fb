"""EAGLE-3 heads (arXiv:2503.01840): one layer of Llama's form, which drafts tokens for a model.

Its queries, keys and values are products with a token's embedding and the hidden state before it, each normed, side by
side. Of tokens that the model has read, that state is the sum of products with the model's own at several depths.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polarlm.model_loaders.config import Eagle3Head, ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families._decoder import ABOUT_MODELS, decoder, plain_tensors, same_windows
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorSpec

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OTHER_ARITHMETIC = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")  # keys of later kinds of heads
_ABOUT_HEADS = (  # keys without arithmetic, or of norms that tensors say, too
    *(*ABOUT_MODELS, "draft_vocab_size", "eagle_decoder_type", "embed_requires_grad", "has_lm_head", "mlp_bias"),
    *("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers", "position_embedding_type"),
    *("speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size"),
    *("target_model_type", "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm"),
)
GGUF = GgufLayout("eagle3", interleaved=True, keys={_LAYERS: "extract_layers", "residual": "norm_before_residual"})
PREFIX = "eagle3."  # of the names of its tensors, beside the model's


def configure(fields: Fields, model: ModelConfig, tensors: Collection[str]) -> Eagle3Head:
    """The head of a configuration, for `model`. tensors: the names in its file. Raises LoadError."""
    if (layer := fields.section("transformer_layer_config")) is not None:  # of the library speculators
        fields = fields.with_values({key: layer.value(key) for key in layer.names()})
    fields.require("num_hidden_layers", 1)
    nested = fields.section("eagle_config")
    for holder in (fields, *([] if nested is None else [nested])):
        for key in _OTHER_ARITHMETIC:
            holder.require(key, False)
        holder.require("use_aux_hidden_state", True)
    layers = fields.integers(_LAYERS)
    if not layers and nested is not None:
        layers = [number + 1 for number in nested.integers(_LAYERS)]  # of the layers that these states are after
    layers = layers or [2, model.depth // 2, model.depth - 3]
    if not all(0 <= number <= model.depth for number in layers):
        raise LoadError(
            f"{fields.where}: the head reads hidden states before layers {', '.join(map(str, layers))}, and this model "
            f"has {model.depth}; give the head of this model."
        )
    head = decoder(fields, "llama", bias=None, windows=same_windows(fields))
    if any(name.endswith(("q_norm.weight", "attn_q_norm.weight")) for name in tensors):
        head = head.with_attention(lambda one: replace(one, qk_norm="head"))
    residual_normed = fields.flag("norm_before_residual", fields.flag("residual", False))
    if not fields.has("gguf_architecture"):
        for holder in (fields, *([] if nested is None else [nested])):
            holder.warn_of_unread(_ABOUT_HEADS)
    return Eagle3Head(
        replace(head, tied_head="lm_head.weight" not in tensors and "output.weight" not in tensors),
        tuple(layers),
        residual_normed=residual_normed,
        has_embedding=head.hidden_size != model.hidden_size or fields.flag("embed_requires_grad", False),
    )


def slots(head: Eagle3Head, states: int) -> tuple[Slots]:
    """The slots of the layer. states: numbers of a hidden state of the model."""
    table, e = plain_tensors(head.model), head.model.hidden_size
    found = {**table.layers[0], "mtp_norm": table.top["norm"]}
    found["mtp_embedding_norm"] = found.pop("attention_norm")
    found["mtp_hidden_norm"] = (TensorSpec("model.layers.0.hidden_norm.weight", "blk.0.attn_norm_2.weight", (e,)),)
    sides = [replace(spec, shape=(spec.shape[0], 2 * e)) for spec in found["qkv"]]
    parts = [f"fc.weight[{at}]" for at in range(len(head.layers))]  # of the product, which files have side by side
    found |= {
        "qkv": tuple(sides),
        "head_states": tuple(TensorSpec(name, name, (e, states)) for name in parts),
    }
    if head.has_embedding:
        found["head_embedding"] = table.top["embedding"]
    if not head.model.tied_head:
        (spec,) = table.top["head"]
        found["head_logits"] = (replace(spec, shape=(len(head.ids) or head.model.vocab_size, e)),)
    return ({slot: tuple(replace(one, name=PREFIX + one.name) for one in specs) for slot, specs in found.items()},)
