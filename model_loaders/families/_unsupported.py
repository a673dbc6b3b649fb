"""Why models are not supported."""

from __future__ import annotations

from polarlm.model_loaders.fields import Fields

_EXPERTS = "a mixture of experts of a family that is not supported: use another family or a dense model"
_HYBRID = (
    "which has recurrent layers of a kind that is not supported: use Qwen3.5, LFM2, Granite 4 H, Nemotron-H, or a "
    "model with attention in all layers"
)
_IMAGES = (
    "a model for images or sound of a kind that is not supported: use Qwen3.5, Qwen3-VL, Mistral Small 3.2, or a "
    "text-only model"
)
_PROJECTOR = "the part of a model that reads images: give the model's own GGUF file, and this one as mmproj"
_ENCODER = (
    "which has an encoder of a kind that is not supported: use a decoder-only model, or for embeddings BERT, "
    "ModernBERT, XLM-R or nomic-embed"
)
_WORDS = {  # in a model type or a GGUF architecture, without "_" and "-"; the first match counts
    _IMAGES: ("vl", "vision", "llava", "mllama", "paligemma", "idefics", "gemma3n", "phi4mm", "smolvlm"),
    _PROJECTOR: ("clip",),
    _EXPERTS: ("moe", "mixtral", "deepseek", "dbrx", "llama4", "grok", "arctic"),
    _HYBRID: ("mamba", "jamba", "rwkv", "falconh1", "bamba", "zamba", "nemotronh", "hybrid", "recurrent"),
    _ENCODER: ("t5", "bart", "whisper", "pegasus", "marian", "bert", "encoder", "electra", "deberta"),
}
_KEYS = {  # in a configuration
    _EXPERTS: ("num_local_experts", "num_experts", "n_routed_experts", "expert_count"),
    _IMAGES: ("vision_config", "audio_config"),
    _HYBRID: ("mamba_d_state", "ssm_cfg", "state_size"),
}


def why_not(name: str, fields: Fields | None = None) -> str | None:
    """Why a type is not supported, and what to use: text to follow its name in a sentence; None if unknown."""
    plain = name.lower().replace("_", "").replace("-", "")
    for reason, words in _WORDS.items():
        if any(word in plain for word in words):
            return reason
    if fields is not None:
        for reason, keys in _KEYS.items():
            if any(fields.has(key) for key in keys):
                return reason
        if fields.has("is_encoder_decoder") and fields.flag("is_encoder_decoder", False):
            return _ENCODER
    return None
