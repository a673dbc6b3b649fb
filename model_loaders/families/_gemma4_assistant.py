"""Gemma 4's assistants: small models that draft tokens for a Gemma 4, whose keys and values all their layers read.

Their input is a token's embedding and the hidden state before it, both of the Gemma 4; their output is the next such
state, too. Some files have centroids, by which a part of the output head is chosen: here all of it is computed.
"""

from __future__ import annotations

import re
from dataclasses import replace

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import gemma4
from polarlm.model_loaders.families._decoder import ABOUT_MODELS
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Slots, TensorSpec

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_ABOUT_ASSISTANTS = (  # keys without arithmetic, or of centroids
    *(*ABOUT_MODELS, "centroid_intermediate_top_k", "global_head_dim", "num_centroids", "num_global_key_value_heads"),
    *("use_ordered_embeddings", "vocab_size_per_layer_input"),
)
PREFIX = "assistant."  # of the names of its tensors, beside the model's
# Names of tensors that files may have, and that are not read: centroids, a second head, keys and values.
UNUSED = re.compile(r"masked_embedding\.|lm_head\.weight$|model\.layers\.\d+\.self_attn\.[kv]_(?:proj|norm)\.")


def configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    """`model`, with the assistant of a configuration. Raises LoadError."""
    section = fields.section("text_config")
    if section is None or fields.value("model_type") not in MODEL_TYPES:
        raise LoadError(f"{fields.where} describes no assistant of Gemma 4; give an assistant's folder.")
    fields.require("tie_word_embeddings", True)
    for key, value in (("hidden_size_per_layer_input", 0), ("enable_moe_block", False), ("use_double_wide_mlp", False)):
        section.require(key, value)
    found = gemma4.configure(section.with_values({"num_kv_shared_layers": 0}))
    found = replace(found.with_attention(lambda one: replace(one, shares_kv=True)), tied_head=True)
    size = fields.integer("backbone_hidden_size", 1536)
    for each in (fields, section):
        each.warn_of_unread(_ABOUT_ASSISTANTS)
    own, there = (
        {(one.window, one.kv_heads, one.head_dim) for one in each.attentions.values()} for each in (found, model)
    )
    if (model.family, model.hidden_size, model.vocab_size) != ("gemma4", size, found.vocab_size) or own - there:
        raise LoadError(
            f"{fields.where}: it is for a Gemma 4 with hidden states of {size:,} numbers, {found.vocab_size:,} tokens, "
            "and keys and values of its own shapes; give the assistant of this model."
        )
    return replace(model, layers=(*model.layers, *found.layers), mtp=True, assistant=found)


def slots(assistant: ModelConfig, states: int) -> tuple[Slots, ...]:
    """The slots of its layers; the first one has those of the whole. states: numbers of a hidden state of the model."""
    table, e = gemma4.tensors(assistant), assistant.hidden_size
    first, *others = table.layers
    whole = {
        "mtp_in": (TensorSpec("pre_projection.weight", "", (e, 2 * states)),),
        "mtp_norm": table.top["norm"],
        "head_logits": table.top["embedding"],
        "head_out": (TensorSpec("post_projection.weight", "", (states, e)),),
    }
    return tuple(
        {slot: tuple(replace(one, name=PREFIX + one.name) for one in specs) for slot, specs in layer.items()}
        for layer in ({**first, **whole}, *others)
    )
