"""Mistral Small 3, Ministral 3, Devstral and Magistral: Mistral; in Ministral 3 queries grow with their positions."""

from __future__ import annotations

from collections.abc import Mapping

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import IMAGE_PREFIXES, decoder, plain_tensors, same_windows
from polarlm.model_loaders.families._gguf import LOG_MULTIPLIER, GgufLayout
from polarlm.model_loaders.fields import Fields

MODEL_TYPES = ("mistral3", "ministral3")
ARCHITECTURES = ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM")
PREFIXES = IMAGE_PREFIXES
tensors = plain_tensors


def _implied_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """The keys of RoPE that other architectures have not. llama.cpp takes mscale for 1."""
    rope, multiplier = values["rope_parameters"], values["log_multiplier"]
    values_implied = {
        "llama_4_scaling_beta": values["growth"],
        "original_max_position_embeddings": values["original_context"],
    }
    if multiplier:
        values_implied |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return {"rope_parameters": {**rope, **values_implied} if isinstance(rope, dict) else values_implied}


GGUF = GgufLayout(
    "mistral3",
    interleaved=True,
    keys={
        "growth": "attention.temperature_scale",
        "original_context": "rope.scaling.original_context_length",
        "log_multiplier": LOG_MULTIPLIER,
    },
    implied_values=_implied_values,
)


def configure(fields: Fields) -> ModelConfig:
    if (text := fields.section("text_config")) is not None:
        if (kind := text.text("model_type", "mistral")) not in ("mistral", "ministral3"):
            raise text.refuse("model_type", "but only mistral and ministral3 are supported")
        is_tied = fields.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
        fields = text.with_values({"model_type": kind, "tie_word_embeddings": is_tied})
    head_dim = 128 if fields.text("model_type") == "ministral3" else None
    windows = same_windows(fields)
    return decoder(fields, "mistral3", head_dim=head_dim, windows=windows, query_growth=_growth(fields))


def _growth(fields: Fields) -> tuple[float, int] | None:
    """`Attention.query_growth`."""
    rope = fields.section("rope_parameters")
    growth = 0.0 if rope is None else rope.number("llama_4_scaling_beta", 0.0)
    if rope is None or not growth:
        return None
    context = fields.integer("max_position_embeddings")
    return growth, rope.integer("original_max_position_embeddings", context)
