"""What encoders have in common: each token sees all others of its text, and sums of residuals are normed."""

from __future__ import annotations

from dataclasses import replace

from polarlm.model_loaders.config import Attention, GatedMLP, Layer, ModelConfig, RopeConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families._decoder import MAX_HEADS, MAX_SIZE, layer_count
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names

NAMES: Names = {
    "qkv": (("attention.self.query", "attn_q"), ("attention.self.key", "attn_k"), ("attention.self.value", "attn_v")),
    "out": (("attention.output.dense", "attn_output"),),
    "attention_post_norm": (("attention.output.LayerNorm", "attn_output_norm"),),
    "gate_up": (("intermediate.dense", "ffn_up"),),
    "down": (("output.dense", "ffn_down"),),
    "ffn_post_norm": (("output.LayerNorm", "layer_output_norm"),),
}
_CLASSIFIER = "ForSequenceClassification"
_EMBEDDINGS = {
    "word_embeddings": "model.embed_tokens",
    "tok_embeddings": "model.embed_tokens",
    "position_embeddings": "model.positions",
    "token_type_embeddings": "model.token_types",
    "LayerNorm": "model.embedding_norm",
}


def layout(architecture: str) -> GgufLayout:
    """The layout of an encoder's GGUF files."""
    return GgufLayout(architecture, keys={"layer_norm_eps": "attention.layer_norm_epsilon"})


def prefixes(base: str, *, layers: str = "encoder.layer", norm: str = "embeddings.LayerNorm") -> dict[str, str]:
    """`PREFIXES` of a family whose files put `base` in front of names, such as "bert.", or nothing.

    layers: the list of layers. norm: the norm of the embeddings.
    """
    renames: dict[str, str] = {}
    for prefix in (base, ""):
        renames |= {f"{prefix}embeddings.{theirs}.": f"{ours}." for theirs, ours in _EMBEDDINGS.items()}
        renames |= {f"{prefix}{norm}.": "model.embedding_norm.", f"{prefix}{layers}.": "model.layers."}
        renames[f"{prefix}final_norm."] = "model.norm."
    return renames


def encoder(
    fields: Fields,
    family: str,
    ffn: GatedMLP,
    *,
    rope: RopeConfig | None = None,
    has_biases: bool = True,
    has_positions: bool = True,
    first_position: int = 0,
) -> ModelConfig:
    """The ModelConfig of an encoder whose layers have the network `ffn`.

    rope: None for a table of positions, unless `has_positions` is false. first_position: see `ModelConfig`.
    """
    hidden_size = fields.integer("hidden_size", maximum=MAX_SIZE)
    count = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    if hidden_size % (2 * count):
        raise fields.refuse("hidden_size", f"but must be a multiple of {2 * count}, for {count} heads of an even size")
    positions = fields.integer("max_position_embeddings", minimum=first_position + 2)
    attention = Attention(
        count, count, hidden_size // count, rope, qkv_bias=has_biases, out_bias=has_biases, is_causal=False
    )
    return ModelConfig(
        family=family,
        layers=(Layer(attention, replace(ffn, bias=has_biases), "sums"),) * layer_count(fields),
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size", maximum=MAX_SIZE),
        max_context=positions - first_position,
        norm_eps=fields.positive("layer_norm_eps"),
        tied_head=True,
        positions=positions if has_positions else 0,
        first_position=first_position,
        token_types=fields.integer("type_vocab_size", minimum=0, maximum=MAX_SIZE),
    )


def scores_pairs(fields: Fields) -> bool:
    """Whether a model has a head that scores pairs of texts. Raises LoadError for a head with several labels."""
    if not fields.has("num_labels") and not any(one.endswith(_CLASSIFIER) for one in fields.texts("architectures")):
        return False
    label_names = fields.section("id2label")
    if fields.has("gguf_architecture") and not fields.flag("has_score_dense", False):
        raise LoadError(
            f"{fields.where} holds a reranker without a part of its head (cls.weight), which llama.cpp's converter "
            "leaves out of BERT's, so that scores would not be the model's: use its safetensors folder."
        )
    labels = fields.integer("num_labels", 2 if label_names is None else len(label_names.present()))
    if labels != 1:
        raise fields.refuse(
            "num_labels" if label_names is None else "id2label",
            "but only classifiers with one label are supported, which rank documents",
        )
    return True


def bert(fields: Fields, family: str, first_position: int = 0) -> ModelConfig:
    """The ModelConfig of BERT and of what differs from it only in vocabulary and positions."""
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.refuse("position_embedding_type", "but only absolute positions are supported")
    if fields.flag("is_decoder", False):
        raise fields.refuse("is_decoder", "but only an encoder is supported for this type")
    if fields.text("hidden_act", "gelu") != "gelu":
        raise fields.refuse("hidden_act", "but only gelu is supported")
    ffn = GatedMLP(fields.integer("intermediate_size", maximum=MAX_SIZE), "gelu")
    config = encoder(fields, family, ffn, first_position=first_position)
    return replace(config, scores_pairs=scores_pairs(fields))
